"""The ranks of one host: started, read and ended together.

The launcher has one for its own host; on every other host an agent (`agent.py`) has one. Neither polls: the owner's
selector waits for the ranks' pipes and pidfds, and the group reports events (`messages.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import DIRECTORY_PREFIX, ENDING_FILE, RESULT_FILE, TASK_FILE, FailureRecord
from hvdlite.core.system_limits import OUT_OF_DESCRIPTORS, explained, reserve_descriptors
from hvdlite.diagnostics.progress import read, read_metrics
from hvdlite.membership.events import Kill, Look, Note, SeenStopped, SendOrder
from hvdlite_runner.host import commands
from hvdlite_runner.host.member_server import MemberServer
from hvdlite_runner.host.polled_program import OPTION, PolledProgram, preemption_script
from hvdlite_runner.host.processes import RankProcess, Reaper, kill_descendants, sample
from hvdlite_runner.host.reaper import look_up
from hvdlite_runner.messages import (
    FORWARDED,
    PIECE_BYTES,
    Event,
    Exited,
    FromMember,
    HostNoticed,
    Output,
    ProcessStart,
    ProgressReply,
    Result,
    Signal,
    Start,
    Started,
    StartRefused,
    TaskPiece,
)
from hvdlite_runner.placement import cores_for

KILL_SECONDS: Final = 5.0
"""Seconds to go on killing remaining processes."""
_DRAIN_READS: Final = 64  # of a pipe that a stray process keeps filling
DRAIN: Final = 1.0
"""Seconds to read the last output of ended ranks when a stray process has their pipes open."""
POLL_WITHOUT_PIDFD: Final = 0.05
_READ_BYTES: Final = 1 << 16
_DESCRIPTORS: Final = 3
"""Descriptors of a rank: its two streams and its process."""


class WorkerGroup:
    """The ranks of one host.

    Processes have keys: ranks their numbers, members of an elastic job their ids. A rank that has ended is reaped at the end
    of the job. The end of a member is reported when its descendants are dead, too, and then it is reaped.

    Args:
        stops: returns whether no more processes are to be started.
        selector: its keys' `data` are functions to call when the descriptor is ready.
        report: called with events, in order.
        inherited: the environment to which the ranks' variables are added.
    """

    def __init__(self, selector: selectors.BaseSelector, report: Callable[[Event], None], inherited: Mapping[str, str],
                 stops: Callable[[], bool] = lambda: False) -> None:
        self.directory = ""
        self.running: dict[int, RankProcess] = {}
        self._selector = selector
        self._report = report
        self._inherited = inherited
        self._stops = stops
        self._reaper: Reaper | None = None
        self._processes: dict[int, RankProcess] = {}
        self._open: dict[tuple[int, str], int] = {}  # descriptors of streams that have not ended
        self._paused = False
        self._asked = False  # whether the ranks have been ordered to end
        self._members: MemberServer | None = None  # of an elastic job
        self._preemption: PolledProgram[float | None] | None = None
        self._killed: set[int] = set()  # members that were killed on an order
        self._dying: dict[int, float] = {}  # members that have ended: until when to wait for the end of their descendants

    def prepare(self, stopped: float = math.inf, grace: float = 0.0) -> None:
        """Create the job's directory, whose name contains this process's id, and start the reaper.

        Args:
            stopped: seconds for which this process may be stopped, before the reaper ends the job.
            grace: of the ranks then.

        Raises:
            LaunchError: when there is no place for the directory, or no process can be started.
        """
        try:
            self.directory = tempfile.mkdtemp(prefix=f"{DIRECTORY_PREFIX}{os.getpid()}-")  # mode 0700
        except OSError as error:
            raise LaunchError(f"cannot create the job's directory: {error.strerror}; is the disk full, or `ulimit -f` 0? "
                              "TMPDIR names another place") from None
        try:
            with explained("the process that ends the job if hvdrun is killed"):
                self._reaper = Reaper(self.directory, stopped, grace)
        except LaunchError:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def watch(self, pid: int) -> None:
        """Let the reaper end another process with the job."""
        assert self._reaper is not None
        self._reaper.watch(pid)

    def forget(self, pid: int) -> None:
        """Take back `watch` for a process that has been reaped."""
        if self._reaper is not None:
            self._reaper.forget(pid)

    def obey(self, order: Start | TaskPiece | Kill | Look | SendOrder | Signal) -> None:
        """Carry out an order.

        Raises:
            LaunchError: when there is no room for the function that the ranks are to call.
        """
        if isinstance(order, Start):
            self._start(order)
        elif isinstance(order, TaskPiece):
            self._add_task(order)
        elif isinstance(order, Signal) and order.signum in FORWARDED:
            for process in self.running.values():
                process.forward(order.signum)
        elif isinstance(order, Signal):
            self._asked = True
            with contextlib.suppress(OSError):  # else members take SIGTERM for a notice, and are killed after the grace
                Path(self.directory, ENDING_FILE).touch()
            for process in self.running.values():
                process.send(order.signum)
        elif isinstance(order, SendOrder):
            assert self._members is not None
            self._members.send(order.member, order.order)
        elif isinstance(order, Look):
            assert self._members is not None
            found = look_up(self._members.pids.get(order.member, 0))
            if found is not None and found.state in "Tt":
                self._report(SeenStopped(order.member))
        elif order.member in self.running:
            self._killed.add(order.member)
            self.running[order.member].send(signal.SIGKILL)

    def _add_task(self, order: TaskPiece) -> None:
        path = Path(self.directory) / TASK_FILE
        try:
            append_private_file(path, order.content)
        except OSError as error:
            raise LaunchError(f"cannot write the function and its arguments to {path} on {socket.gethostname()}: "
                              f"{error.strerror}; make room there, or set TMPDIR to a place that has it") from None

    def _start(self, order: Start) -> None:
        """Start processes, or report why one cannot be started."""
        if order.is_elastic and self._members is None:
            self._members = MemberServer(self._selector, self.directory,
                                         lambda *received: self._report(FromMember(*received)))
        if order.preemption_script and self._preemption is None:
            self._preemption = preemption_script(order.preemption_script, lambda line: self._report(Note(line)), self)
        count = len(order.processes)
        try:
            with reserve_descriptors(_DESCRIPTORS * count, f"starting {count} processes on one host"):
                for each in order.processes:
                    if self._stops() or not (self._start_process(each, order) or order.is_elastic):
                        return
        except LaunchError as error:
            for each in order.processes:
                if each.key not in self._processes:
                    self._report(StartRefused(each.key, str(error), commands.NOT_EXECUTABLE))

    def _start_process(self, each: ProcessStart, order: Start) -> bool:
        cores: list[int] = []
        if each.core_share is not None and hasattr(os, "sched_getaffinity"):
            cores = cores_for(*each.core_share, sorted(os.sched_getaffinity(0)))
        settings = {name: os.fsdecode(value) for name, value in {**order.environment, **each.environment}.items()}
        environment = commands.rank_environment(each.world, self.directory, self._inherited, settings)
        words = [os.fsdecode(word) for word in order.command]
        try:
            command = commands.resolve_command(words, environment.get("PATH"))
            assert self._reaper is not None
            with self._reaper.marks(), explained(f"the process of rank {each.world.rank}"):
                process = RankProcess(each.key, command, environment, cores,
                                      has_input=order.has_input and each.world.rank == 0)
            self._adopt(process)
            return True
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                raise
            refused = commands.refused(words, error)
        except commands.CommandError as error:
            refused = error
        self._report(StartRefused(each.key, str(refused), refused.code))
        return False

    def _adopt(self, process: RankProcess) -> None:
        assert self._reaper is not None
        self._reaper.watch(process.pid, rank=True)
        self._processes[process.key] = self.running[process.key] = process
        for name, stream in process.streams.items():
            self._open[process.key, name] = stream.fileno()
            if not self._paused:
                self._listen(process.key, name)
        if process.pidfd >= 0:
            self._selector.register(process.pidfd, selectors.EVENT_READ, self.notice)
        self._report(Started(process.key, process.pid, process.unbound))

    def notice(self) -> None:
        """Report the ranks that have ended since the last call, and a notice; reap adopted orphans."""
        left = None if self._preemption is None else self._preemption.turn(time.monotonic())
        if self._preemption is not None and left is not None:
            self._preemption.close()
            self._report(HostNoticed(OPTION, left))
        for key, process in list(self.running.items()):
            code = process.exit_code()
            if code is None:
                continue
            if process.pidfd >= 0 and process.pidfd in self._selector.get_map():
                self._selector.unregister(process.pidfd)
            if self._members is not None and self._kill_descendants(process):
                continue
            del self.running[key]
            if self._members is not None:
                self._members.forget(key)
                for stream in [stream for stream in self._open if stream[0] == key]:  # of which the writers have ended
                    while stream in self._open and self._read(*stream):
                        pass
            record = FailureRecord.read(self.directory, key)
            if record is not None:
                record = dataclasses.replace(record, when=time.time() - record.when)
            reading = dataclasses.replace(read(self.directory, key), metrics=read_metrics(self.directory, key))
            self._report(Exited(key, code, self._asked or key in self._killed, record, reading))
            if self._members is not None:
                self._collect(process)
        if self._reaper is not None:
            self._reaper.reap()

    def sample(self) -> ProgressReply:
        """Return the progress of the processes that run."""
        return ProgressReply(*sample(self.directory, {key: each.pid for key, each in self.running.items()}))

    def wait(self) -> float:
        """Return the seconds until `notice` is due, if no descriptor makes it due before; infinity for never."""
        needs_polling = bool(self._dying) or any(process.pidfd < 0 for process in self.running.values())
        due = math.inf if self._preemption is None else self._preemption.wait(time.monotonic())
        return min(POLL_WITHOUT_PIDFD, due) if needs_polling else due

    def _kill_descendants(self, process: RankProcess) -> bool:
        """Kill what is left of a member that has ended; return whether there was something, which may still be alive."""
        until = self._dying.setdefault(process.key, time.monotonic() + KILL_SECONDS)
        if not kill_descendants(self.directory, process) and time.monotonic() < until:
            return True
        del self._dying[process.key]
        return False

    def _collect(self, process: RankProcess) -> None:
        """Forget a member that has ended, so that a long job does not keep a process for each."""
        assert self._reaper is not None
        for stream in [stream for stream in self._open if stream[0] == process.key]:
            if not self._paused:
                self._selector.unregister(self._open[stream])
            del self._open[stream]
        self._send_result(process.key)
        del self._processes[process.key]
        process.close()
        self._reaper.forget(process.pid)

    def pause(self, paused: bool) -> None:
        """Stop reading from the ranks, whose writes then block, or resume; at the end, everything is read."""
        if paused == self._paused or self._reaper is None:
            return
        self._paused = paused
        for key, name in self._open:
            if paused:
                self._selector.unregister(self._open[key, name])
            else:
                self._listen(key, name)

    def end(self) -> None:
        """Kill all processes of the job, report the last events, and remove the directory. May be called again."""
        self.pause(True)
        reaper, self._reaper = self._reaper, None
        if reaper is None:
            return
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        if self._members is not None:
            self._members.close()
            self._members = None
        try:
            for process in self.running.values():
                process.send(signal.SIGKILL)
            reaper.end_job(KILL_SECONDS)
            self._drain()
            self.notice()
            for key in self._processes:
                self._send_result(key)
        finally:
            for process in self._processes.values():
                process.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            reaper.stop()

    def _listen(self, key: int, name: str) -> None:
        self._selector.register(self._open[key, name], selectors.EVENT_READ, lambda: self._read(key, name))

    def _read(self, key: int, name: str) -> bool:
        """Report output of a rank; return whether there was any."""
        if (key, name) not in self._open:
            return False  # a member that was collected by an earlier event of the same round
        try:
            content = os.read(self._open[key, name], _READ_BYTES)
        except BlockingIOError:
            return False
        if not content:
            if not self._paused:
                self._selector.unregister(self._open[key, name])
            del self._open[key, name]
        self._report(Output(key, name, content))
        return bool(content)

    def _drain(self) -> None:
        """Read the rest of the pipes: all that is there now, and then what still comes from stray processes, for a while."""
        for key in list(self._open):
            for _ in range(_DRAIN_READS):
                if not self._read(*key):
                    break
        until = time.monotonic() + DRAIN
        with selectors.DefaultSelector() as waiting:
            for key, descriptor in self._open.items():
                waiting.register(descriptor, selectors.EVENT_READ, key)
            while self._open and (left := until - time.monotonic()) > 0:
                for ready, _ in waiting.select(left):
                    self._read(*ready.data)
                    if ready.data not in self._open:
                        waiting.unregister(ready.fd)

    def _send_result(self, key: int) -> None:
        """Report the result of a rank, if it has written one, in pieces."""
        path = Path(self.directory) / f"{RESULT_FILE}.{key}"
        if path.exists():
            for content, is_last in pieces_of(path, PIECE_BYTES):
                self._report(Result(key, content, is_last))


def pieces_of(path: Path, size: int) -> Iterator[tuple[bytes, bool]]:
    """Yield a file's content in pieces, and whether each is the last one; an empty file has one."""
    with open(path, "rb") as file:
        content = file.read(size)
        while following := file.read(size):
            yield content, False
            content = following
        yield content, True


def append_private_file(path: Path, content: bytes) -> None:
    """Append to a file that only this user can read.

    Raises:
        OSError: when it cannot be written completely.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
