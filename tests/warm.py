"""Ranks that are forked from a process that has imported their frameworks and hvdlite, and has done nothing else.

To import TensorFlow or torch takes a rank longer than most tests take with it. A forked rank has for itself what a started
one has: a session, the environment, `__main__`, random numbers, an ordinary end of the interpreter. Ranks beside each other
come from two such processes, so strings hash differently in them, as usual.

Tests of how a process begins, or of Python as it comes, start theirs: `Processes` with `imported=()`. So does whatever runs
under hvdrun and mpiexec.

This file is both ends: what tests import, and the program that imports the frameworks.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
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

READ_LATER = ("HVDLITE_", "HOROVOD_", "PYTHONHASHSEED", "BENCH_")
"""How variables begin that no framework reads when it is imported."""

FRONTENDS = {"torch": "hvdlite_torch.optimizer.distributed_optimizer", "keras": "hvdlite_tf.keras"}


class Rank:
    """A forked process, with what tests use of a `subprocess.Popen`."""

    def __init__(self, pid: int, told: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = told

    def __del__(self) -> None:
        os.close(self._told)

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return self._told

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
    """A process that imports modules, and then forks ranks. All test processes of a run share it; it ends after them.

    Args:
        name: of the abstract socket at which it listens.
        modules: what it imports.
        environment: what it is started with, if nobody has started it yet.
    """

    def __init__(self, name: str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._control, self._modules = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), modules
        while True:
            self._process = self._started(name, environment)  # kept, so that it is waited for
            with contextlib.suppress(ConnectionRefusedError):  # who has bound the name is about to listen, or has ended
                self._control.connect(f"\0{name}")
                return

    def _started(self, name: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Return the process that listens at the name; None when another test process has started it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as theirs:
            try:
                theirs.bind(f"\0{name}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return None
            theirs.listen()
            return subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *self._modules], stdin=subprocess.DEVNULL,
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
        assert answer, f"the importer of {', '.join(self._modules)} has ended; why stands in the captured errors"
        return rank


_kept: dict[tuple[object, ...], list[Importer]] = {}
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
"""Equal in the test processes of one run."""


def importers(modules: Sequence[str], environment: Mapping[str, str], given: Mapping[str, str]) -> list[Importer]:
    """Return the two processes that have imported `modules` for this run, or are about to.

    Args:
        environment: what they are started with if there are none.
        given: the part of it that the test has set: with another one, other processes.
    """
    key = (*modules, *sorted(item for item in given.items() if not item[0].startswith(READ_LATER)))
    if key not in _kept:
        name = f"hvdlite-tests-{_RUN}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        _kept[key] = [Importer(f"{name}-{number}", modules, environment) for number in range(2)]
    return _kept[key]


# --- the other end -----------------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in the new process, and None in this one when all tests have ended."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"importing {sys.argv[2:]} starts {threads - 1} threads, which a forked process would lack"
    gc.freeze()  # what has been imported is garbage in no rank, and is not looked through
    died, dies = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(dies, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tells: dict[int, int] = {}
    listener.settimeout(60)  # seconds; who has started this process connects, unless it was killed
    controls = [listener.accept()[0]]
    listener.setblocking(True)
    while controls or tells:
        ready, _, _ = select.select([died, *controls, *([listener] if controls else [])], [], [])
        if died in ready:
            os.read(died, 4096)
            tell_of_the_dead(tells)
        if listener in ready:
            controls.append(listener.accept()[0])
        for control in [each for each in controls if each in ready]:
            request, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
            if not request:
                controls.remove(control)
                control.close()
                continue
            out, err, tell = descriptors
            pid = os.fork()
            if pid == 0:
                become_a_process(out, err, [*(each.detach() for each in (listener, *controls)), died, dies, tell,
                                            *tells.values()])
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


def _without_autotuning() -> None:
    """Turn off the tuning of datasets: a `fit` ends when a thread that tunes wakes up (docs/keras-features.md)."""
    dataset_ops = importlib.import_module("tensorflow.python.data.ops.dataset_ops")
    options = dataset_ops.options_lib.Options()
    options.autotune.enabled = False
    dataset_ops.DatasetV2._apply_debug_options = lambda dataset: dataset_ops._OptionsDataset(dataset, options)


if __name__ == "__main__":
    del sys.path[0]  # the tests of torch are in a folder called torch
    _frontends = [frontend for framework, frontend in FRONTENDS.items() if framework in sys.argv]
    for _module in [*sys.argv[2:], "hvdlite.api", *_frontends]:
        importlib.import_module(_module)
    if "tensorflow" in sys.argv:
        _without_autotuning()
    _job = serve(socket.socket(fileno=int(sys.argv[1])))
    if _job is not None:
        run(_job)
