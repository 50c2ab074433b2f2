"""`hvdlite.run`: call a function on every rank of a new job, from a script or a notebook, and get its results.

The caller signs the function and its arguments with the job's key and starts `hvdrun`, which sends the bytes to every host
without reading them. A rank (`launch.run_task`) verifies the signature before it unpickles anything, and signs
its result, which the caller verifies in turn. The key is part of the job's environment and never of a command line.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, TextIO

import cloudpickle

from hvdlite.core.errors import LaunchError, PeerLostError, ProtocolError
from hvdlite.core.launch_contract import (
    CAUSE_FILE,
    KEY_FILE,
    MEMBERS_FILE,
    OUTPUT_LOST,
    RESULT_FILE,
    TASK_FILE,
    write_private_file,
)
from hvdlite.core.own_programs import module_command

_log = logging.getLogger("hvdlite")
_DIGEST: Final = hashlib.sha256
_MAC_BYTES: Final = 32


class RankTraceback(Exception):
    """Raised as the cause of a rank's exception; the text is the traceback on that rank."""


def pickled_failure(error: BaseException) -> bytes:
    """Return what a rank sends whose function has raised an exception: `(True, (exception, traceback))`, pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        return bytes(cloudpickle.dumps((True, (error, text))))
    except Exception:  # of any kind: the exception's own methods are called
        return bytes(cloudpickle.dumps((True, (RuntimeError(f"{type(error).__name__}: {error}"), text))))


def pickled_result(value: object) -> bytes:
    """Return what a rank sends whose function has returned a value: `(False, value)`, pickled."""
    return bytes(cloudpickle.dumps((False, value)))


def run(func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
        num_proc: int | None = None, min_num_proc: int | None = None, max_num_proc: int | None = None,
        slots: int | None = None, reset_limit: int | None = None, cooldown_range: Sequence[float] | None = None, *,
        np: int | None = None, min_np: int | None = None, max_np: int | None = None, hosts: str | None = None,
        hostfile: str | None = None, host_discovery_script: str | None = None, start_timeout: float | None = None,
        ssh_port: int | None = None, ssh_identity_file: str | None = None, output_filename: str | None = None,
        verbose: bool | None = None, use_gloo: bool | None = None, use_mpi: bool | None = None,
        network_interfaces: Sequence[str] | str | None = None, executable: str | None = None,
        env: Mapping[str, str] | None = None, options: Sequence[str] = (), **horovods: Any) -> list[Any]:
    """Call `func(*args, **kwargs)` on every rank of a new job; return the results in rank order.

    The job is elastic with `min_np`, `max_np` or `host_discovery_script` (docs/elastic.md); the results are those of the
    ranks with which it ended.

    The function calls `hvd.init()` itself if it needs to. A function of a notebook or of `__main__` is pickled by value
    (cloudpickle); a function of a module is pickled by reference, and every host must have the module.

    Args:
        func: called on every rank.
        args: its arguments, pickled.
        kwargs: likewise.
        num_proc, min_num_proc, max_num_proc: Horovod's names of `np`, `min_np` and `max_np`.
        slots: slots of a discovered host that names none.
        reset_limit: how often the ranks of an elastic job may change.
        cooldown_range: for how many seconds at least and at most what has failed is not used; default: as hvdrun's.
        np: number of ranks; default: one on each slot of `hosts`, else 1.
        min_np, max_np: the least and the greatest number of ranks of an elastic job.
        hosts: as `hvdrun -H`: "a:2,b:4"; default: this host, or the scheduler's allocation.
        hostfile: a file of hosts, one a line: name slots=N.
        host_discovery_script: a program that prints the hosts, one a line: host:slots.
        start_timeout: seconds in which all ranks must have started.
        ssh_port: of the other hosts.
        ssh_identity_file: a private key for them.
        output_filename: keep each rank's output under this directory.
        verbose: whether hvdrun says what it does.
        use_gloo: accepted for Horovod's sake.
        use_mpi: must not be true: hvdrun itself starts the ranks.
        network_interfaces: names of those between the hosts; default: the one of the route.
        executable: Python for the ranks; default: this one.
        env: variables on top of this process's environment.
        options: further options of hvdrun, such as `["--bind", "--fold"]`.
        horovods: Horovod's other arguments; unsupported ones must be None.

    Raises:
        ValueError: for arguments that exclude each other or are not supported.
        LaunchError: when the job cannot be started.
        PeerLostError: when a rank ended without an exception: it was killed, or called `os._exit`.
        Exception: the exception of the rank that failed first, with its traceback as the cause.
    """
    refused = [name for name, value in horovods.items() if value is not None and name not in _IGNORED]
    if refused:
        raise ValueError(f"run() has no use for {', '.join(refused)} in this version")
    if not callable(func):
        raise ValueError("run() calls the function on every rank: pass the function, as in run(train, np=2), and not what "
                         f"it returns ({func!r})")
    size = np if np is not None else num_proc
    least, most = (min_np if min_np is not None else min_num_proc), (max_np if max_np is not None else max_num_proc)
    if sum(given is not None for given in (hosts, hostfile, host_discovery_script)) > 1:
        raise ValueError("give one of hosts, hostfile and host_discovery_script")
    is_elastic = any(given is not None for given in (least, most, host_discovery_script))
    if not is_elastic and any(given is not None for given in (slots, reset_limit, cooldown_range)):
        raise ValueError("slots, reset_limit and cooldown_range are for elastic jobs: give min_np, max_np or "
                         "host_discovery_script, too")
    if cooldown_range is not None and (isinstance(cooldown_range, str) or len(cooldown_range) != 2):
        raise ValueError(f"cooldown_range is a pair of seconds, the least and the greatest, not {cooldown_range!r}")
    if use_gloo and use_mpi:
        raise ValueError("give either use_gloo or use_mpi")
    if use_mpi:
        raise ValueError("functions are started by hvdrun itself, not by mpirun: leave use_mpi out, and choose the plane of "
                         "tensors with env or options")
    if size is None and hosts is None and hostfile is None and not is_elastic:
        size = 1
        _log.warning("run() without np starts one rank; pass np=2 for two")
    flags = {"-np": size, "--min-np": least, "--max-np": most, "--slots-per-host": slots, "--reset-limit": reset_limit,
             "--host-discovery-script": host_discovery_script,
             "-H": hosts, "--hostfile": hostfile, "--start-timeout": start_timeout, "--ssh-port": ssh_port,
             "--ssh-identity-file": ssh_identity_file, "--output-filename": output_filename,
             "--network-interface": network_interfaces if network_interfaces is None or isinstance(network_interfaces, str)
             else ",".join(network_interfaces)}
    arguments = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    if cooldown_range is not None:
        arguments += ["--blacklist-cooldown-range", *map(str, cooldown_range)]
    arguments += ["--verbose"] if verbose else []
    with tempfile.TemporaryDirectory(prefix="hvdlite-run-") as directory:  # mode 0700
        key = secrets.token_hex()
        task = sign(_pickled(func, args, dict(kwargs or {})), bytes.fromhex(key), "task")
        for name, content in ((KEY_FILE, key.encode()), (TASK_FILE, task)):
            write_for_task(Path(directory) / name, content, "the function and its arguments")
        command = [*module_command("hvdlite_runner"), *arguments, *options, "--task-directory", directory,
                   *module_command("hvdlite.launch.run_task", executable or sys.executable)]
        code, messages = _launch(command, {**os.environ, **(env or {})})
        if code not in (0, OUTPUT_LOST) or (Path(directory) / CAUSE_FILE).exists():  # a rank may end with that code, too
            _raise_root_error(Path(directory), bytes.fromhex(key), code, messages)
        return _results(Path(directory), bytes.fromhex(key))


def write_for_task(path: Path, content: bytes, what: str) -> None:
    """Write a file of a task.

    Args:
        what: it contains, for the error's text.

    Raises:
        LaunchError: when there is no room for it.
    """
    try:
        write_private_file(path, content)
    except OSError as error:
        raise LaunchError(f"cannot write {len(content):,} bytes ({what}) to {path} on "
                          f"{socket.gethostname()}: {error.strerror}; make room there, or set TMPDIR to a place that has it"
                          ) from None


_IGNORED: Final = frozenset({"disable_cache"})


def sign(content: bytes, key: bytes, purpose: str) -> bytes:
    """Return the MAC (HMAC-SHA256 over purpose and content) followed by `content`."""
    return _mac(content, key, purpose) + content


def _mac(content: bytes | memoryview, key: bytes, purpose: str) -> bytes:
    mac = hmac.new(key, purpose.encode() + b"|", _DIGEST)
    mac.update(content)  # it may be large: not copied
    return mac.digest()


def verified(signed: bytes, key: bytes, purpose: str) -> memoryview:
    """Verify a MAC and return the signed content.

    Raises:
        ProtocolError: when the MAC does not match this key, purpose and content.
    """
    mac, content = signed[:_MAC_BYTES], memoryview(signed)[_MAC_BYTES:]
    if not key or not hmac.compare_digest(mac, _mac(content, key, purpose)):
        raise ProtocolError(f"the {purpose} was not signed with the job's key; it is not unpickled")
    return content


def _pickled(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """Return the pickled call, preceded by the module search path: unpickling may import.

    The path has two parts: what comes before the standard library, like the script's directory, and the rest.
    """
    library = os.path.dirname(os.__file__)
    first = sys.path.index(library) if library in sys.path else 0
    return bytes(cloudpickle.dumps((sys.path[:first], sys.path[first:], cloudpickle.dumps((func, tuple(args), kwargs)))))


def _launch(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Run the launcher and forward its output, also in a notebook; return its exit code and its standard error.

    The launcher ends the job when its standard input is closed, which happens when this process dies.
    """
    launcher = subprocess.Popen(command, env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, start_new_session=True, bufsize=0)
    messages: list[str] = []
    assert launcher.stdout is not None and launcher.stderr is not None and launcher.stdin is not None
    readers = [threading.Thread(target=_forward, args=pair, daemon=True, name="hvdlite-run-output")
               for pair in ((launcher.stdout, sys.stdout, None), (launcher.stderr, sys.stderr, messages))]
    for reader in readers:
        reader.start()
    with launcher.stdin:
        try:
            code = launcher.wait()
        except KeyboardInterrupt:
            launcher.send_signal(signal.SIGINT)
            launcher.wait()
            raise
    for reader in readers:
        reader.join()
    return code, "".join(messages)


def _forward(source: IO[bytes], target: TextIO, messages: list[str] | None) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while content := source.read(1 << 16):
        text = decoder.decode(content)
        if messages is not None:
            messages.append(text)
        with contextlib.suppress(Exception):  # a stream that is closed, full or None, or a notebook's: hvdrun must not block
            target.write(text)
            target.flush()


def _results(directory: Path, key: bytes) -> list[Any]:
    """Return one result for each rank, in rank order.

    Raises:
        LaunchError: when hvdrun has not written which ranks there were.
        PeerLostError: when a rank has ended without a result.
    """
    try:  # ranks, or the members of an elastic job's last world
        senders = json.loads((directory / MEMBERS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"hvdrun has not written which ranks have ended: {error}") from None
    results = []
    for rank, sender in enumerate(senders):
        if not (directory / f"{RESULT_FILE}.{sender}").exists():
            raise PeerLostError(f"rank {rank} has ended without a result: it called os._exit, or its host was lost", rank)
        failed, value = _result(directory, sender, key)
        if failed:
            raise PeerLostError(f"rank {rank} has left the function with {type(value[0]).__name__} instead of a result",
                                rank) from RankTraceback(f"on rank {rank}:\n{value[1]}")
        results.append(value)
    return results


def _result(directory: Path, sender: int, key: bytes) -> tuple[bool, Any]:
    """Return whether a rank or member raised an exception, and its result or the exception."""
    signed = (directory / f"{RESULT_FILE}.{sender}").read_bytes()
    failed, value = cloudpickle.loads(verified(signed, key, f"result {sender}"))
    return failed, value


def _raise_root_error(directory: Path, key: bytes, code: int, messages: str) -> None:
    """Raise the error that made the job fail."""
    cause = directory / CAUSE_FILE
    if not cause.exists():
        errors = [line.removeprefix("hvdrun: ") for line in messages.splitlines() if line.startswith("hvdrun: ")]
        raise LaunchError("\n".join(errors) or f"hvdrun ended with code {code}")
    first = json.loads(cause.read_text(encoding="utf-8"))
    if (directory / f"{RESULT_FILE}.{first['rank']}").exists():
        failed, value = _result(directory, first["rank"], key)
        if failed:
            error, text = value
            raise error from RankTraceback(f"on rank {first['rank']}:\n{text}")
    raise PeerLostError(first["text"], first["rank"])
