"""Run a job: start the ranks, show what they write, notice how they end, and end the rest.

One loop over the ranks' pipes and pidfds; nothing polls while nothing happens. Once a rank has failed, the others get
`GRACE` seconds to end by themselves, because they have been told and their own message is the useful one; then they are
asked (SIGTERM), then killed.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hvdlite.core.errors import LaunchError
from hvdlite.core.world import World
from hvdlite_runner import commands, failures
from hvdlite_runner.failures import Exit
from hvdlite_runner.output import Console
from hvdlite_runner.placement import cores_for
from hvdlite_runner.processes import Guardian, RankProcess, kill

GRACE = 3.0
"""Seconds between a failure and SIGTERM for the other ranks."""
KILL_AFTER = 1.5
"""Seconds between SIGTERM and SIGKILL after a failure."""
INTERRUPT_PATIENCE = 5.0
"""Seconds between the user's signal and SIGKILL."""
DRAIN = 1.0
"""Seconds to read what ended ranks wrote, should a stray process hold their pipes open."""
_POLL_WITHOUT_PIDFD = 0.05
DIRECTORY_PREFIX = "hvdlite-job-"
"""Of a job's directory; the launcher's process id follows."""


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """What to run and how to show it."""

    worlds: Sequence[World]
    command: Sequence[str]
    environment: Mapping[str, str]  # on top of what is inherited
    output_directory: str | None = None
    prefix: bool = True
    timestamps: bool = False
    bind: bool = False
    verbose: bool = False
    notice: str = ""  # what the user should know; said once, when the ranks are started


def run_job(settings: JobSettings, inherited: Mapping[str, str]) -> int:
    """Run a job to its end and return the launcher's exit code: 0, or the first failure's.

    Takes the process over meanwhile: its signal handlers, and the orphans of its descendants.

    Raises:
        LaunchError: when the directory for the output cannot be written.
        CommandError: when the system refuses to start the command.
    """
    job = _Job(settings)
    with job.signals():  # before there is anything to clean up
        job.open_files()
        directory = tempfile.mkdtemp(prefix=f"{DIRECTORY_PREFIX}{os.getpid()}-")  # mode 0700
        guardian = Guardian(directory)
        try:
            try:
                job.start(directory, inherited, guardian)
                job.loop(guardian)
            finally:
                job.over = True
                kill(job.ranks)
                guardian.end_job(INTERRUPT_PATIENCE)
                job.drain()
            return job.report(directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            guardian.dismiss()


class _Job:
    """The state of one job."""

    def __init__(self, settings: JobSettings) -> None:
        self.ranks: list[RankProcess] = []
        self.over = False  # from here on a signal changes nothing: what it asks for is under way
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._console = Console(_write, self._prefix)
        self._files: dict[tuple[int, str], int] = {}
        self._running: dict[int, RankProcess] = {}
        self._exits: list[Exit] = []
        self._signal = 0  # the user's
        self._steps: list[tuple[float, int]] = []  # (when, signal) still to be sent to the running ranks
        self._asked = False  # whether any of them has been sent

    def open_files(self) -> None:
        """Make the files for the ranks' output, when they are asked for.

        Raises:
            LaunchError: when that is not possible.
        """
        if self._settings.output_directory is None:
            return
        width = len(str(len(self._settings.worlds) - 1))
        try:
            for world in self._settings.worlds:
                folder = Path(self._settings.output_directory) / f"rank.{world.rank:0{width}d}"
                folder.mkdir(parents=True, exist_ok=True)
                for name in ("stdout", "stderr"):
                    self._files[world.rank, name] = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise LaunchError(f"cannot write to --output-filename {self._settings.output_directory}: "
                              f"{error.filename}: {error.strerror}") from None

    def start(self, directory: str, inherited: Mapping[str, str], guardian: Guardian) -> None:
        if self._settings.notice:
            for line in self._settings.notice.splitlines():
                self._console.note(f"hvdrun: {line}")
        cores = sorted(os.sched_getaffinity(0)) if self._settings.bind and hasattr(os, "sched_getaffinity") else []
        for world in self._settings.worlds:
            if self._signal:
                return
            environment = commands.rank_environment(world, directory, inherited, self._settings.environment)
            mine = cores_for(world.local_rank, world.local_size, cores) if cores else []
            try:
                process = RankProcess(world.rank, self._settings.command, environment, mine)
            except OSError as error:
                raise commands.refused(self._settings.command, error) from None
            guardian.watch(process)
            self.ranks.append(process)
            self._running[world.rank] = process
            for name, stream in process.streams.items():
                self._selector.register(stream, selectors.EVENT_READ, (world.rank, name))
            if process.pidfd >= 0:
                self._selector.register(process.pidfd, selectors.EVENT_READ, (world.rank, "exit"))
            if self._settings.verbose:
                self._console.note(f"hvdrun: rank {world.rank} is process {process.pid}")

    def loop(self, guardian: Guardian) -> None:
        while self._running:
            for key, _ in self._selector.select(self._timeout()):
                rank, what = key.data
                if what in ("stdout", "stderr"):
                    self._read(rank, what)
                elif what == "signal":
                    os.read(key.fd, 4096)
                    guardian.reap()
            self._notice_exits()
            self._take_steps()

    def drain(self) -> None:
        """Read what is left in the pipes."""
        until = time.monotonic() + DRAIN
        while any(key.data[1] in ("stdout", "stderr") for key in self._selector.get_map().values()):
            ready = self._selector.select(max(0.0, until - time.monotonic()))
            for key, _ in ready:
                if key.data[1] in ("stdout", "stderr"):
                    self._read(*key.data)
                else:
                    self._selector.unregister(key.fileobj)
            if time.monotonic() >= until:
                break
        self._console.finish()
        self._notice_exits()
        for process in self.ranks:
            process.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._selector.close()

    def report(self, directory: str) -> int:
        """Say what failed first; return the exit code."""
        if self._signal:
            self._console.note(f"hvdrun: ended by {signal.Signals(self._signal).name}")
            return 128 + self._signal
        records = failures.read_records(directory, [world.rank for world in self._settings.worlds])
        cause = failures.root_cause(self._exits, records)
        if cause is None:
            return 0
        for line in cause.describe():
            self._console.note(f"hvdrun: {line}")
        return cause.exit.shell_code

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turn SIGINT, SIGTERM and SIGHUP (but not under nohup) into an orderly end.

        SIGCHLD is taken too: it wakes the loop for adopted orphans, and were it ignored, as some parents leave it, the
        kernel would keep no exit codes.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._selector.register(reader, selectors.EVENT_READ, (-1, "signal"))
        ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            ending.remove(signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupted) for number in ending}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.over:
            return
        if self._signal:  # the second time: at once
            self._steps = [(now, signal.SIGKILL)]
        else:
            self._signal = number
            polite = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self._steps = [(now, polite), (now + INTERRUPT_PATIENCE, signal.SIGKILL)]

    def _timeout(self) -> float | None:
        waits = [max(0.0, self._steps[0][0] - time.monotonic())] if self._steps else []
        if any(process.pidfd < 0 for process in self._running.values()):
            waits.append(_POLL_WITHOUT_PIDFD)
        return min(waits, default=None)

    def _take_steps(self) -> None:
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, number = self._steps.pop(0)
            self._asked = True
            for process in self._running.values():
                process.send(number)

    def _notice_exits(self) -> None:
        for rank, process in list(self._running.items()):
            code = process.exit_code()
            if code is None:
                continue
            del self._running[rank]
            if process.pidfd >= 0:
                self._selector.unregister(process.pidfd)
            ended = Exit(rank, code, ended_by_us=self._asked)
            self._exits.append(ended)
            if ended.failed and not self._steps and not self._asked:
                now = time.monotonic()
                self._steps = [(now + GRACE, signal.SIGTERM), (now + GRACE + KILL_AFTER, signal.SIGKILL)]

    def _read(self, rank: int, name: str) -> None:
        stream = self.ranks[rank].streams[name]
        try:
            content = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._console.feed(rank, name, content)
        self._keep(rank, name, content)
        if not content:
            self._selector.unregister(stream)

    def _keep(self, rank: int, name: str, content: bytes) -> None:
        """Write a rank's output to its own file, when asked to."""
        if (rank, name) in self._files:
            os.write(self._files[rank, name], content)

    def _prefix(self, rank: int, name: str) -> str:
        when = f"{time.asctime()} " if self._settings.timestamps else ""
        return f"{when}[{rank}]<{name}>:" if self._settings.prefix else when


def _write(name: str, text: str) -> None:
    """Write to the launcher's own stream; a reader that has gone, or lacks a character, does not end the job."""
    stream = sys.stdout if name == "stdout" else sys.stderr
    try:
        stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
