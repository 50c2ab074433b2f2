"""`hvdlite.run`: call a function on every rank of a new job, from a script or a notebook, and get its results.

The caller signs function and arguments with a key made for this job and starts `hvdrun`, which carries the bytes to every
host without looking into them. A rank (`launch.run_task`) checks the signature before it unpickles anything,
and signs its result, which the caller checks in turn. The key travels with the job's environment, never on a command line.
"""

from __future__ import annotations

import codecs
import hashlib
import hmac
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, TextIO

import cloudpickle

from hvdlite.core.errors import LaunchError, PeerLostError, ProtocolError
from hvdlite.core.launch_contract import CAUSE_FILE, KEY_FILE, RESULT_FILE, TASK_FILE, write_privately

_DIGEST: Final = hashlib.sha256
_MAC_BYTES: Final = 32
_USAGE_ERROR: Final = 2  # of hvdrun: no rank was started


class RankTraceback(Exception):
    """Raised as the cause of a rank's exception; its text is the traceback there."""


def run(func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
        num_proc: int | None = None, *, np: int | None = None, hosts: str | None = None, hostfile: str | None = None,
        start_timeout: float | None = None, ssh_port: int | None = None, ssh_identity_file: str | None = None,
        output_filename: str | None = None, verbose: bool | None = None, use_gloo: bool | None = None,
        use_mpi: bool | None = None, network_interfaces: Sequence[str] | str | None = None, executable: str | None = None,
        env: Mapping[str, str] | None = None, options: Sequence[str] = (), **horovods: Any) -> list[Any]:
    """Call `func(*args, **kwargs)` on every rank of a new job; return the results in rank order.

    The function calls `hvd.init()` itself if it needs to. It may be defined in a notebook or in `__main__`: it is pickled
    by value (cloudpickle) then, and by reference when it lies in a module, which every host must have.

    Args:
        np: number of ranks (Horovod: `num_proc`); default: one on each slot of `hosts`, else 1.
        hosts: as `hvdrun -H`: "a:2,b:4"; default: this host, or the scheduler's allocation.
        output_filename: keep each rank's output under this directory.
        executable: Python for the ranks; default: this one.
        env: variables on top of this process's environment.
        options: more of hvdrun's, such as `["--bind", "--fold"]`.
        horovods: Horovod's other arguments; elastic ones and those without a meaning here must be None.

    Raises:
        ValueError: for arguments that exclude each other, or that mean nothing here.
        LaunchError: when the job cannot be started.
        PeerLostError: when a rank ended without an exception: it was killed, or left with `os._exit`.
        Exception: the first failed rank's own, with its traceback as the cause.
    """
    refused = [name for name, value in horovods.items() if value is not None and name not in _IGNORED]
    if refused:
        raise ValueError(f"run() has no use for {', '.join(refused)} in this version")
    size = np if np is not None else num_proc
    if hosts is not None and hostfile is not None:
        raise ValueError("give either hosts or hostfile")
    if use_gloo and use_mpi:
        raise ValueError("give either use_gloo or use_mpi")
    if use_mpi:
        raise ValueError("functions are started by hvdrun itself, not by mpirun: leave use_mpi out, and choose the plane of "
                         "tensors with env or options")
    if size is None and hosts is None and hostfile is None:
        size = 1
    flags = {"-np": size, "-H": hosts, "--hostfile": hostfile, "--start-timeout": start_timeout, "--ssh-port": ssh_port,
             "--ssh-identity-file": ssh_identity_file, "--output-filename": output_filename,
             "--network-interface": network_interfaces if network_interfaces is None or isinstance(network_interfaces, str)
             else ",".join(network_interfaces)}
    chosen = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    chosen += ["--verbose"] if verbose else []
    with tempfile.TemporaryDirectory(prefix="hvdlite-run-") as directory:  # mode 0700
        key = secrets.token_hex()
        write_privately(Path(directory) / KEY_FILE, key.encode())
        call = _pickled(func, args, dict(kwargs or {}))
        write_privately(Path(directory) / TASK_FILE, sign(call, bytes.fromhex(key), "task"))
        command = [sys.executable, "-m", "hvdlite_runner.cli", *chosen, *options, "--task-directory", directory,
                   executable or sys.executable, "-m", "hvdlite.launch.run_task"]
        code, said = _launch(command, {**os.environ, **(env or {})})
        if code != 0:
            _raise(Path(directory), bytes.fromhex(key), code, said)
        ranks = sorted(int(path.suffix[1:]) for path in Path(directory).glob(f"{RESULT_FILE}.*"))
        return [_result(Path(directory), rank, bytes.fromhex(key))[1] for rank in ranks]


_IGNORED: Final = frozenset({"disable_cache"})


def sign(content: bytes, key: bytes, purpose: str) -> bytes:
    """Return `content` behind its MAC (HMAC-SHA256 over purpose and content)."""
    return hmac.digest(key, purpose.encode() + b"|" + content, _DIGEST) + content


def verified(signed: bytes, key: bytes, purpose: str) -> bytes:
    """Return what was signed.

    Raises:
        ProtocolError: when the MAC is not that of this key, purpose and content.
    """
    mac, content = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
    if not key or not hmac.compare_digest(mac, hmac.digest(key, purpose.encode() + b"|" + content, _DIGEST)):
        raise ProtocolError(f"the {purpose} was not signed with the job's key; it is not unpickled")
    return content


def _pickled(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """Return the call; the module search path goes ahead, because unpickling may import."""
    return bytes(cloudpickle.dumps((sys.path, cloudpickle.dumps((func, tuple(args), kwargs)))))


def _launch(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Run the launcher and show its output here, also in a notebook; return its exit code and its own messages.

    It sees the end of its standard input when this process dies, and ends the job then.
    """
    launcher = subprocess.Popen(command, env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, start_new_session=True, bufsize=0)
    said: list[str] = []
    assert launcher.stdout is not None and launcher.stderr is not None and launcher.stdin is not None
    readers = [threading.Thread(target=_forward, args=pair, daemon=True, name="hvdlite-run-output")
               for pair in ((launcher.stdout, sys.stdout, []), (launcher.stderr, sys.stderr, said))]
    for reader in readers:
        reader.start()
    with launcher.stdin:
        while True:
            try:
                code = launcher.wait()
                break
            except KeyboardInterrupt:
                launcher.send_signal(signal.SIGINT)
                launcher.wait()
                raise
    for reader in readers:
        reader.join()
    return code, "".join(said)


def _forward(source: IO[bytes], target: TextIO, said: list[str]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while content := source.read(1 << 16):
        text = decoder.decode(content)
        said.append(text)
        target.write(text)
        target.flush()


def _result(directory: Path, rank: int, key: bytes) -> tuple[bool, Any]:
    """Return (whether it is an exception, what the rank returned or raised)."""
    failed, value = cloudpickle.loads(verified((directory / f"{RESULT_FILE}.{rank}").read_bytes(), key, f"result {rank}"))
    return failed, value


def _raise(directory: Path, key: bytes, code: int, said: str) -> None:
    """Raise what made a job fail."""
    cause = directory / CAUSE_FILE
    if not cause.exists():
        messages = [line.removeprefix("hvdrun: ") for line in said.splitlines() if line.startswith("hvdrun: ")]
        raise LaunchError("\n".join(messages) or f"hvdrun ended with code {code}")
    first = json.loads(cause.read_text(encoding="utf-8"))
    if (directory / f"{RESULT_FILE}.{first['rank']}").exists():
        failed, value = _result(directory, first["rank"], key)
        if failed:
            error, text = value
            raise error from RankTraceback(f"on rank {first['rank']}:\n{text}")
    raise PeerLostError(first["text"], first["rank"])
