"""The processes of ranks and their progress: each is started in its own session, and ended with all its descendants.

A rank is not reaped before the end of the job: until then its process id identifies it, its group and its session, and the
system cannot reuse it.

`sample` is what the launcher receives of their progress each second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from hvdlite.core import launch_contract
from hvdlite.core.errors import ProtocolError
from hvdlite.core.launch_contract import REPORT_SOCKET
from hvdlite.core.sockets import connect_unix
from hvdlite.diagnostics import progress
from hvdlite_runner.host import reaper
from hvdlite_runner.messages import Sample
from hvdlite_runner.placement import format_ranks

_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_LIMIT_RANGE: Final = 1 << 16
_LARGE_LIMIT: Final = 1 << 40


class RankProcess:
    """The process of one rank, with two pipes for its output.

    Args:
        has_input: whether it gets this process's standard input; else it has none.

    Attributes:
        pid: the id of the process, its session and its group.
        unbound: why the process is not bound to its cores; "" if it is, or there are none.
    """

    def __init__(self, key: int, command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int], *,
                 has_input: bool = False) -> None:
        self.key = key
        self._process = subprocess.Popen(command, env=dict(environment), stdin=None if has_input else subprocess.DEVNULL,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None and self._process.stderr is not None
        self.streams: dict[str, IO[bytes]] = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for stream in self.streams.values():
            os.set_blocking(stream.fileno(), False)
        self.unbound = _bind(self.pid, cores)
        self.pidfd = _watch(self.pid)

    def exit_code(self) -> int | None:
        """Return the exit code (negative: killed by that signal), or None while it runs."""
        return exit_code(self._process)

    def send(self, signum: int) -> None:
        """Send a signal to the rank and the processes of its group.

        A rank that handles SIGTERM gets it alone: it may want to save its state with the help of its workers.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it and all processes of its group have ended
            if signum == signal.SIGTERM and self.handles(signum):
                os.kill(self.pid, signum)
            else:
                os.killpg(self.pid, signum)

    def forward(self, signum: int) -> None:
        """Send a signal to the rank alone, if it handles it; else that would end it."""
        if self.handles(signum):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def handles(self, signum: int) -> bool:
        """Return whether the rank has a handler for a signal; False on systems other than Linux."""
        return reaper.handles(self.pid, signum)

    def close(self) -> None:
        """Reap the process and close its descriptors."""
        self._process.wait()
        for stream in self.streams.values():
            stream.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Reaper:
    """The reaper process, which ends the job if the launcher is killed (`reaper.py`), and the launcher's own use of it.

    Args:
        stopped: seconds for which this process may be stopped, before the reaper kills it.
        grace: of the ranks between SIGTERM and SIGKILL, in seconds, if the launcher is killed.
    """

    def __init__(self, job_directory: str, stopped: float = math.inf, grace: float = 0.0) -> None:
        self._mark = mark(job_directory)
        self._limit = _unused_limit()
        self._ranks: dict[int, int] = {}
        self._excluded = {  # the program that became the launcher by exec may have had children
            pid for pid, process in reaper.process_table().items() if process.parent == os.getpid()}
        self._subreaper = os.getpid() if _adopt_orphans() else 0
        environment = {name: value for name, value in os.environ.items() if name != launch_contract.JOB_DIRECTORY}
        command = [sys.executable, "-S", "-E", str(Path(reaper.__file__)), job_directory, self._mark,
                   str(self._limit), str(stopped), str(grace)]
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL, start_new_session=True, env=environment)
        self._excluded.add(self._process.pid)

    @contextlib.contextmanager
    def marks(self) -> Iterator[None]:
        """Let processes that are started in this context, and their descendants, have the job's limit of message queues.

        It is a little lower than the limit here, and no other job has the same: a child that cleans its environment, begins
        a session and loses its parent still has it.
        """
        if not self._limit:
            yield
            return
        before = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (self._limit, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_MSGQUEUE, before)

    def watch(self, pid: int, *, rank: bool = False) -> None:
        """Add a process that the reaper kills with the job; the launcher itself kills only ranks."""
        process = reaper.look_up(pid)
        start = 0 if process is None else process.start
        if rank:
            self._ranks[pid] = start
        else:
            self._excluded.add(pid)
        self._write(b"rank %d %d\n" % (pid, start))

    def forget(self, pid: int) -> None:
        """Remove a process that has been reaped: the system may use its id again."""
        self._ranks.pop(pid, None)
        self._excluded.discard(pid)
        self._write(b"gone %d\n" % pid)

    def end_job(self, timeout: float) -> None:
        """Kill all remaining processes of the job, in any session."""
        reaper.kill_job(os.fsencode(self._mark), self._ranks, self._limit, timeout)
        self.reap()

    def reap(self) -> None:
        """Reap adopted orphans that have ended."""
        table = reaper.process_table() if self._subreaper else {}
        for pid, process in table.items():
            if process.parent == self._subreaper and process.state == "Z" and pid not in {*self._ranks, *self._excluded}:
                os.waitpid(pid, os.WNOHANG)

    def stop(self) -> None:
        """End the reaper after the launcher has cleaned up."""
        self._write(b"done\n")
        try:
            self._process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed; the job does not depend on it
            self._process.stdin.write(line)


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process (negative: killed by that signal), which is not reaped, or None while it runs.

    On macOS before Python 3.13 it is reaped.
    """
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll()
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _unused_limit() -> int:
    """Return a limit of message queues that no process has; 0 where there is no such limit, or it is too small."""
    if not hasattr(resource, "RLIMIT_MSGQUEUE"):
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
    most = _LARGE_LIMIT if soft == resource.RLIM_INFINITY else soft
    used = set(reaper.limits_in_use().values())
    while most > 2 * _LIMIT_RANGE and used:
        limit = most - 1 - secrets.randbelow(_LIMIT_RANGE)
        if limit not in used:
            return limit
    return 0


def _bind(pid: int, cores: Sequence[int]) -> str:
    """Bind a process to cores; return why that was refused, "" if it was not."""
    try:
        if cores:
            os.sched_setaffinity(pid, cores)
    except ProcessLookupError:
        pass  # it has ended
    except OSError as error:  # a sandbox, or the cores were taken away since
        return error.strerror or str(error)
    return ""


def _watch(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends, or -1 if the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1  # an old Python, an old kernel, a sandbox


def _adopt_orphans() -> bool:
    """Adopt descendants whose parent ends (Linux), so that they can be found; return whether this is possible."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def mark(job_directory: str) -> str:
    """Return the entry of the environment that all processes of a job inherit."""
    return f"{launch_contract.JOB_DIRECTORY}={job_directory}"


def kill_descendants(job_directory: str, process: RankProcess) -> bool:
    """Kill what is left of a member of an elastic job after its end, in any session; return whether nothing was found."""
    member = f"{launch_contract.MEMBER}={process.key}"
    return reaper.kill_rank([os.fsencode(mark(job_directory)), member.encode()], process.pid)


STALL_SECONDS: Final = 2.0
"""Seconds without a step after which rank 0 is asked which ranks wait for which."""
_ASK_SECONDS: Final = 0.5
_GPU_SECONDS: Final = 2.0


def sample(directory: str, pids: Mapping[int, int]) -> tuple[dict[int, Sample], str]:
    """Return the readings of a host's processes, and, on rank 0's host while one waits, which ranks wait for which.

    Args:
        directory: of the job.
        pids: the process ids, by rank.
    """
    loads = _gpu_loads(pids)
    ranks = {rank: Sample(progress.read(directory, rank), progress.resident_memory(pid), loads.get(pid, ""))
             for rank, pid in pids.items()}
    waits = ""
    socket_path = Path(directory) / REPORT_SOCKET  # on rank 0's host
    if any(STALL_SECONDS < each.reading.idle < math.inf for each in ranks.values()) and socket_path.exists():
        waits = _stall_summary(socket_path)
    return ranks, waits


def _stall_summary(path: Path) -> str:
    """Ask rank 0; return "" when it does not answer immediately."""
    with contextlib.suppress(OSError, ValueError, KeyError, ProtocolError):
        return "\n".join(stall_lines(ask(path, _ASK_SECONDS)["report"]))
    return ""


def stall_lines(report: Mapping[str, Any]) -> list[str]:
    """Return a line with the longest wait of a stall report and its reason."""
    if not report["stalls"]:
        return []
    stall = max(report["stalls"], key=lambda each: float(each["waited_seconds"]))
    return [f"ranks {format_ranks(stall['submitted'])} wait for {format_ranks(stall['missing'])}: '{stall['name']}', "
            f"{stall['waited_seconds']:.0f} s", *(f"  {line}" for line in report["diagnosis"])]


def _gpu_loads(pids: Mapping[int, int]) -> dict[int, str]:
    """Return "load memory" of the GPU that each process uses, by process id; empty without nvidia-smi.

    In a container nvidia-smi may report other process ids; then the i-th rank is assumed to use the i-th GPU.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    cards = _nvidia_smi("gpu", "uuid,utilization.gpu,memory.used")
    load = {words[0]: words[1] for words in cards}
    apps = {int(pid): f"{load.get(uuid, '?')}% {memory} MiB" for pid, uuid, memory in _nvidia_smi(
        "compute-apps", "pid,gpu_uuid,used_memory") if pid.isdigit()}
    if any(pid in apps for pid in pids.values()):
        return apps
    ordered = [pids[rank] for rank in sorted(pids)]
    return {pid: f"{words[1]}% {words[2]} MiB" for pid, words in zip(ordered, cards, strict=False)}


def _nvidia_smi(subject: str, fields: str) -> list[list[str]]:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(["nvidia-smi", f"--query-{subject}={fields}", "--format=csv,noheader,nounits"],
                               capture_output=True, text=True, check=False, timeout=_GPU_SECONDS)
        return [[word.strip() for word in line.split(",")] for line in asked.stdout.splitlines()]
    return []


def ask(path: Path, timeout: float) -> dict[str, Any]:
    """Return rank 0's answer at its socket: the "text" and the "report".

    Raises:
        ProtocolError: when another user listens there.
        OSError: when there is no answer in time.
        ValueError: when the answer is invalid.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connect_unix(connection, str(path))
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    answer: dict[str, Any] = json.loads(b"".join(parts))
    return answer
