"""Worlds for tests: ranks as threads (rung 2) or as processes (rung 3).

Ranks run a function of a module: `threads` calls `step(runtime)` in this process; the ranks of `processes` import the
function's module and call it, with their runtime if its first parameter is `runtime`, so that the same function runs as
both. Programs of processes are in modules of their own, tests/**/programs/*.py: a rank imports neither pytest nor a
framework that its program does not use. A test whose process is not to import such a framework either names the function:
"module:function".
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import faulthandler
import inspect
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdlite.core import launch_contract
from hvdlite.core.config import Config
from hvdlite.core.world import Hosts
from hvdlite.runtime.assemble import Learned
from hvdlite.runtime.runtime import Runtime
from tests import temporary, warm
from tests.rank_threads import PlaneWrapper, assemble_threads

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
PYTHON_PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
"""Where processes find the packages and the tests; without an empty entry, which is the working directory."""
HVDRUN = [sys.executable, "-m", "hvdlite_runner"]
SHRINKS = ["--blacklist-for-good"]
"""Flags of an elastic job whose failed slots are not used again, so that its worlds only shrink."""
HANGS_SECONDS = 150.0
"""After so long, what a test waits for has hung: tests run on busy machines too, and none asserts how fast something is."""
NUMPY = ("numpy",)
"""What ranks begin with, if a test does not say."""
TORCH = ("torch", "torch._dynamo")
"""What ranks with torch can begin with: the first optimizer imports the latter."""


def threads(size: int, step: Callable[..., T], *arguments: object, timeout: float = HANGS_SECONDS,
            learned: Learned | None = None, wrap: PlaneWrapper = lambda rank, plane: plane, **config: object) -> list[T]:
    """Run `step(runtime, *arguments)` on ranks as threads; return the results in rank order, or raise the first failure.

    Args:
        learned: with which the world begins.
        wrap: changes the planes of ranks.
    """
    settings = Config.from_environment({}, **{"shutdown_timeout": 10.0, **config})
    runtimes = assemble_threads(size, settings, wrap, learned=learned)
    results: list[T | None] = [None] * size
    failures: list[tuple[float, int, BaseException]] = []

    def body(runtime: Runtime) -> None:
        runtime.start()
        try:
            results[runtime.world.rank] = step(runtime, *arguments)
        except BaseException as error:
            failures.append((time.monotonic(), runtime.world.rank, error))
            runtime.fail(type(error).__name__, str(error), "")
        finally:
            runtime.shutdown()

    workers = [threading.Thread(target=body, args=(runtime,), daemon=True) for runtime in runtimes]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + timeout
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise min(failures, key=lambda failure: failure[0])[2]
    hung = [rank for rank, worker in enumerate(workers) if worker.is_alive()]
    if hung:
        faulthandler.dump_traceback(all_threads=True)
        raise TimeoutError(f"ranks {hung} are still running after {timeout} s; stacks above")
    return results  # type: ignore[return-value]


@dataclasses.dataclass
class Ended:
    """How one rank of a process world ended."""

    rank: int
    code: int  # negative: killed by that signal
    stdout: str
    stderr: str
    result: Any = None
    """What the program returned."""


Program = Callable[..., object] | str
"""A function of a module, or where it is: "module:function"."""


class Processes:
    """A world of processes, each running the same program; leaves nothing behind.

    Args:
        program: a function of a module, or its name ("module:function"), by which the ranks import it; or a script.
        arguments: of the function, literals; or of the script, strings. What the function returns is a literal too.
        hosts: how many ranks each of several hosts has; they are hosts to the ranks, because each has a job directory of its
            own. Without it there is one.
        imported: modules that the ranks begin with (tests/warm.py); with `()` they are started as by a launcher.
    """

    def __init__(self, size: int, program: Program | Path, *arguments: object,
                 environment: dict[str, str] | None = None,
                 hosts: Sequence[int] = (), imported: Sequence[str] = NUMPY) -> None:
        ends = list(itertools.accumulate(hosts or [size]))
        groups = Hosts(tuple(tuple(range(begin, end)) for begin, end in itertools.pairwise([0, *ends])))
        assert ends[-1] == size
        self.directory = tempfile.mkdtemp(prefix=temporary.prefix("test"))
        self._directories = [self.directory, *(tempfile.mkdtemp(prefix=temporary.prefix("test")) for _ in hosts[1:])]
        self._files = tempfile.TemporaryDirectory(prefix=temporary.prefix("out"))
        self.ranks: list[subprocess.Popen[bytes] | warm.Rank] = []
        try:
            self._start(groups, program, arguments, environment or {}, imported)
        except BaseException:
            self.__exit__()
            raise

    def _start(self, groups: Hosts, program: Program | Path, arguments: Sequence[object], environment: Mapping[str, str],
               imported: Sequence[str]) -> None:
        several = len(groups.ranks_by_host) > 1
        meeting = {name: value for name, value in over_tcp().items() if several and name != "HVDLITE_CONTROL"}
        for rank in range(sum(map(len, groups.ranks_by_host))):
            env = {
                **clean_environment(),
                **launch_contract.rank_environment(
                    groups.world(rank), self._directories[groups.ranks_by_host.index(groups.local_ranks(rank))]), **meeting,
                "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1",
                # On a busy machine: the first ranks of a framework wait until it is imported, one importer after the other.
                "HVDLITE_START_TIMEOUT": "120", "PYTHONUNBUFFERED": "1", **environment,
            }
            words = [str(each) for each in arguments] if isinstance(program, Path) else []
            if isinstance(program, Path):
                script = program
            else:
                script = self._path(rank, "py")
                script.write_text(_calling(program, arguments, self._path(rank, "result")), encoding="utf-8")
            with open(self._path(rank, "stdout"), "wb") as out, open(self._path(rank, "stderr"), "wb") as err:
                self.ranks.append(start(rank, script, words, env, (out.fileno(), err.fileno()), imported, environment))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self._files.cleanup()
        for directory in self._directories:
            for left in Path(directory).iterdir():
                left.unlink()
            os.rmdir(directory)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank; return when all its threads have stopped, if that is the signal."""
        pid = self.ranks[rank].pid
        os.kill(pid, number)
        while number == signal.SIGSTOP and any(
                stat.read_text(errors="replace").rpartition(")")[2].split()[0] != "T"
                for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
            time.sleep(0.001)

    def wait_for(self, rank: int, text: str, timeout: float = HANGS_SECONDS, stream: str = "stdout") -> None:
        """Block until a rank has written `text`."""
        deadline = time.monotonic() + timeout
        while text not in self._path(rank, stream).read_text(encoding="utf-8", errors="replace"):
            if time.monotonic() > deadline or self.ranks[rank].poll() is not None:
                raise AssertionError(f"rank {rank} never printed {text!r}: {self.told(rank)}")
            time.sleep(0.01)

    def wait_for_all(self, text: str) -> None:
        """Block until every rank has written `text`."""
        for rank in range(len(self.ranks)):
            self.wait_for(rank, text)

    def wait(self, timeout: float = HANGS_SECONDS) -> list[Ended]:
        """Wait for every rank and return how each ended; the hung ones are named, with their stacks."""
        deadline = time.monotonic() + timeout
        for rank, process in enumerate(self.ranks):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} is still running after {timeout} s: {self.told(rank)}") from None
        return [self.told(rank) for rank in range(len(self.ranks))]

    def told(self, rank: int) -> Ended:
        """Return what a rank has written until now, and how it ended; the code of one that runs is 9999."""
        code = self.ranks[rank].poll()
        out, err = (self._path(rank, stream).read_text(encoding="utf-8", errors="replace")
                    for stream in ("stdout", "stderr"))
        result = self._path(rank, "result")
        return Ended(rank, 9999 if code is None else code, out, err,
                     ast.literal_eval(result.read_text(encoding="utf-8")) if code == 0 and result.exists() else None)

    def _path(self, rank: int, stream: str) -> Path:
        return Path(self._files.name) / f"{rank}.{stream}"


def start(rank: int, script: Path, words: Sequence[str], environment: Mapping[str, str], output: tuple[int, int],
          imported: Sequence[str], given: Mapping[str, str]) -> subprocess.Popen[bytes] | warm.Rank:
    """Start a rank that runs `script`, in a session of its own.

    Args:
        output: the descriptors of its standard output and error.
        imported: modules that it begins with; see `Processes`.
        given: the part of the environment that the test has set.
    """
    if imported:
        return warm.importers(imported, environment, given)[rank % 2].fork(script, words, environment, *output)
    out, err = output
    return subprocess.Popen([sys.executable, str(script), *words], env=environment, stdout=out, stderr=err,
                            stdin=subprocess.DEVNULL, start_new_session=True)


def _calling(program: Program, arguments: Sequence[object], result: Path) -> str:
    """Return a script that calls a function and writes down what it returns."""
    assert ast.literal_eval(repr(arguments)) == arguments, f"ranks get literals as arguments, not {arguments}"
    module, name = program.split(":") if isinstance(program, str) else (program.__module__, program.__name__)
    call = f"result = program(*{arguments!r})\n"
    if callable(program) and next(iter(inspect.signature(program).parameters), "") == "runtime":
        call = f"from hvdlite import api\napi.init()\nresult = program(api.runtime(), *{arguments!r})\napi.shutdown()\n"
    return (f"from {module} import {name} as program\n{call}"
            f"if result is not None:\n    with open({str(result)!r}, 'w', encoding='utf-8') as file:\n"
            f"        file.write(repr(result))\n")


def clean_environment(*others: str) -> dict[str, str]:
    """Return this process's environment but for our variables, and those whose names begin with one of `others`."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HVDLITE_", "HOROVOD_", *others))}


def over_tcp(port: int = 0) -> dict[str, str]:
    """Return the environment of ranks that meet at a port of this host, by default a free one."""
    return {"HVDLITE_CONTROL": "tcp", launch_contract.COORDINATOR: f"127.0.0.1:{port or free_port()}",
            launch_contract.SECRET: secrets.token_hex()}


def free_port() -> int:
    """Return a port of this host at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes(size: int, program: Program | Path, *arguments: object, timeout: float = HANGS_SECONDS,
              environment: dict[str, str] | None = None, hosts: Sequence[int] = (),
              imported: Sequence[str] = NUMPY) -> list[Ended]:
    """Run a program on `size` ranks and return how each ended; a rank that failed fails the test, which shows them all."""
    with Processes(size, program, *arguments, environment=environment, hosts=hosts, imported=imported) as world:
        ended = world.wait(timeout)
    assert not any(rank.code for rank in ended), "\n".join(
        f"rank {rank.rank} ended with {rank.code}\n{rank.stdout}\n{rank.stderr}" for rank in ended)
    return ended


OTHERS_MEMORY = ("mpich_shm", "vader_", "sm_segment", "plasma", "ray", "torch_", "sem.")
"""How files in /dev/shm begin that other libraries make, maybe in a test that runs at the same time."""


def descriptors(*kinds: str) -> set[str]:
    """Return what this process has open of these kinds, such as "eventfd" or "socket:".

    Tests of other kinds share the process: threads that they leave behind open and close other descriptors meanwhile.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{number}")
            if any(kind in link for kind in kinds):
                found.add(f"{number} {link}")
    return found


def shared_memory() -> set[str]:
    """Return the files in /dev/shm that a job of ours could have left."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OTHERS_MEMORY)}
