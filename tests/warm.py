"""Ranks that are forked from a process that has imported their frameworks, and has done nothing else.

To import TensorFlow or torch takes a rank longer than most tests take with it. A forked rank has for itself what a started
one has: a session, the environment, `__main__`, random numbers, an ordinary end of the interpreter; and hvdlite is imported
by nobody before. Ranks beside each other come from two such processes, so strings hash differently in them, as usual.

Tests of how a process begins, or of Python as it comes, start theirs: `Processes` without `imported`. So does whatever runs
under hvdrun and mpiexec.

This file is both ends: what tests import, and the program that imports the frameworks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KEPT = 2
"""Pairs of importers that wait at a time; each has the memory of its frameworks."""
READ_LATER = ("HVDLITE_", "HOROVOD_", "PYTHONHASHSEED")
"""How variables begin that no framework reads when it is imported."""


class Rank:
    """A forked process, with what tests use of a `subprocess.Popen`."""

    def __init__(self, pid: int, told: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = told

    def __del__(self) -> None:
        os.close(self._told)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
        return code

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            told = os.read(self._told, 100)
            assert told, "the importer has ended, and nobody knows how its ranks did"
            self.returncode = int(told)
        return self.returncode


class Importer:
    """A process that imports modules, and then forks ranks."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules], stdin=subprocess.DEVNULL,
                env={name: value for name, value in environment.items() if not name.startswith(READ_LATER)},
                pass_fds=[theirs.fileno()])

    def fork(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> Rank:
        """Return a rank that runs `script`, as `python script arguments` would."""
        told, tells = os.pipe()
        with open(tells, "wb"):
            job = {"arguments": [str(script), *arguments], "environment": dict(environment)}
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._control, [json.dumps(job).encode()], [out, err, tells])
            answer = self._control.recv(100)
        rank = Rank(int(answer or 0), told)
        assert answer, f"an importer has ended: {self._process.args}; why stands in the captured errors"
        return rank

    def end(self) -> None:
        """Let it end as soon as the ranks that it has forked have."""
        self._control.close()


_kept: dict[tuple[object, ...], list[Importer]] = {}


def importers(modules: Sequence[str], environment: Mapping[str, str], given: Mapping[str, str]) -> list[Importer]:
    """Return the two processes that have imported `modules` for this test process, or are about to.

    Args:
        environment: what they are started with if there are none.
        given: the part of it that the test has set: with another one, other processes.
    """
    key = (*modules, *sorted(item for item in given.items() if not item[0].startswith(READ_LATER)))
    pair = _kept.pop(key, None) or [Importer(modules, environment) for _ in range(2)]
    while len(_kept) >= KEPT:
        for importer in _kept.pop(next(iter(_kept))):
            importer.end()
    _kept[key] = pair  # last, so the first one is what was not used for longest
    return pair


# --- the other end -----------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in the new process, and None in this one when tests have ended."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"importing {sys.argv[2:]} starts {threads - 1} threads, which a forked process would lack"
    gc.freeze()  # what has been imported is garbage in no rank, and is not looked through
    died, dies = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(dies, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tells: dict[int, int] = {}
    open_to_requests = True
    while open_to_requests or tells:
        ready, _, _ = select.select([died, *([control] if open_to_requests else [])], [], [])
        if died in ready:
            os.read(died, 4096)
            tell_of_the_dead(tells)
        if control in ready:
            request, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
            open_to_requests = bool(request)
            if not request:
                continue
            out, err, tell = descriptors
            pid = os.fork()
            if pid == 0:
                become_a_process(out, err, [control.detach(), died, dies, tell, *tells.values()])
                job: dict[str, Any] = json.loads(request)
                return job
            os.close(out)
            os.close(err)
            tells[pid] = tell
            control.send(str(pid).encode())
    return None


def tell_of_the_dead(tells: dict[int, int]) -> None:
    """Write down how each process that has ended did."""
    for pid, tell in list(tells.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            with contextlib.suppress(BrokenPipeError):
                os.write(tell, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(tells.pop(pid))


def become_a_process(out: int, err: int, spare: Sequence[int]) -> None:
    """Leave to the process that has forked this one what is its own."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor, place in ((out, 1), (err, 2)):
        os.dup2(descriptor, place)
        os.close(descriptor)
    for descriptor in spare:
        os.close(descriptor)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].random.default_generator.seed()


def run(job: dict[str, Any]) -> None:
    """Do what Python does when it is started with a script."""
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = job["arguments"]
    script = sys.argv[0]
    sys.path.insert(0, os.path.dirname(script))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)  # noqa: S102 as Python does


if __name__ == "__main__":
    del sys.path[0]  # the tests of torch are in a folder called torch
    for _module in sys.argv[2:]:
        importlib.import_module(_module)
    _job = serve(socket.socket(fileno=int(sys.argv[1])))
    if _job is not None:
        run(_job)
