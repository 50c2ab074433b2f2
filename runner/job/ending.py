"""The processes of a job and how they end: signals, the failure that was the first, and the exit code of hvdrun."""

from __future__ import annotations

import dataclasses
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final

from hvdlite.core.launch_contract import RESULTS_LOST, FailureRecord
from hvdlite.membership.events import EndJob
from hvdlite.membership.history import exit_text, shell_code
from hvdlite_runner.job.hints import hints, printed_record, rest_of_message
from hvdlite_runner.messages import FORWARDED
from hvdlite_runner.placement import format_ranks

KILL_AFTER: Final = 1.5
"""Seconds between SIGTERM and SIGKILL after a failure."""
INTERRUPT_GRACE: Final = 5.0
"""Seconds between Ctrl-C and SIGKILL."""
TERMINATE_GRACE: Final = 30.0
"""Seconds between the user's SIGTERM or SIGHUP and SIGKILL, as Slurm and Kubernetes have it."""
_A_DAY: Final = 86_400.0  # to wait at once; selectors overflow at a few weeks
SLURM_END: Final = "SLURM_JOB_END_TIME"
"""The variable with the time, in seconds since 1970, at which Slurm ends the job."""


class Ending:
    """The signals that end a job's processes, and when they are due.

    | what happens | the processes get |
    |---|---|
    | the job is over (`EndJob`) | SIGTERM after its grace, SIGKILL `KILL_AFTER` later |
    | Ctrl-C | SIGINT, and SIGKILL after the grace: `INTERRUPT_GRACE` if it is not given |
    | SIGTERM or SIGHUP | SIGTERM, and SIGKILL after the grace: `TERMINATE_GRACE` if it is not given |
    | a second signal of the user | SIGKILL |
    | a signal after a failure | the same, but SIGKILL no later than without it |
    | SIGUSR1 or SIGUSR2 | the same, if they handle it |
    | a signal while the job is cleaned up | nothing; it ends the wait for readers of the output |

    The first row counts once, and not after a signal of the user.

    Args:
        grace: in seconds; None for the defaults.

    Attributes:
        user_signal: the first signal of the user; 0 for none.
        later_signal: the first one while or after the job is cleaned up.
        is_over: whether the job is being cleaned up.
        grace: between the user's signal and SIGKILL, when there was one.
        is_grace_over: whether what was left then has been killed for this reason.
        came_late: whether the job had ended by itself before.
    """

    def __init__(self, grace: float | None = None) -> None:
        self.user_signal = self.later_signal = 0
        self.is_over = False
        self.grace = math.inf if grace is None else grace
        self.is_grace_over = self.came_late = False
        self._is_given = grace is not None
        self._is_pressed = False  # there was a second signal
        self._forwarded: list[int] = []
        self._pending: list[tuple[float, int]] = []  # (time, signal), in order

    def has_ended(self, grace: float) -> None:
        """Schedule the signals after the end of the job."""
        if not self._pending and not self.user_signal:
            now = time.monotonic()
            self._pending = [(now + grace, signal.SIGTERM), (now + grace + KILL_AFTER, signal.SIGKILL)]

    def interrupt(self, signum: int, frame: FrameType | None = None) -> None:
        """Schedule the signals after a signal of the user."""
        now = time.monotonic()
        if self.is_over:
            self.later_signal = self.later_signal or signum
            return
        if self.user_signal:
            self._pending, self._is_pressed = [(now, signal.SIGKILL)], True
        else:
            self.user_signal = signum
            first = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
            if not self._is_given:
                self.grace = INTERRUPT_GRACE if signum == signal.SIGINT else TERMINATE_GRACE
            self.came_late = bool(self._pending)
            self._pending = [(now, first), min([(now + self.grace, signal.SIGKILL), *self._pending[-1:]])]

    def forward(self, signum: int, frame: FrameType | None = None) -> None:
        """Pass on a signal that does not end the job by itself."""
        if not self.is_over:
            self._forwarded.append(signum)

    def due(self) -> Iterator[int]:
        """Yield the signals that are due, and remove them from the schedule."""
        while self._forwarded:
            yield self._forwarded.pop(0)
        while self._pending and self._pending[0][0] <= time.monotonic():
            signum = self._pending.pop(0)[1]
            if signum == signal.SIGKILL and self.user_signal and not self._is_pressed:
                self.is_grace_over = True
            yield signum

    def wait(self) -> float | None:
        """Return the seconds until the next signal; None if none is scheduled."""
        if self._forwarded:
            return 0.0
        return min(max(0.0, self._pending[0][0] - time.monotonic()), _A_DAY) if self._pending else None

    def explain(self, signum: int, environ: Mapping[str, str]) -> str:
        """Return a line about a signal that is due, where it is not plain what becomes of it; else "".

        Args:
            environ: where the scheduler may say when it ends the job itself.
        """
        if signum in FORWARDED:
            return f"{signal.Signals(signum).name} goes to the ranks that handle it"
        end = environ.get(SLURM_END, "")
        left = int(end) - time.time() if end.isdecimal() and self.user_signal and signum != signal.SIGKILL else 0.0
        return f"Slurm ends this job in {left:.0f} s ({SLURM_END}), before --grace {self.grace:g}" if (
            0 < left < self.grace) else ""

    @contextmanager
    def handlers(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP (but not under nohup) by an orderly end of the job; pass SIGUSR1 and SIGUSR2 on.

        SIGCHLD is handled as well: it wakes the loop for adopted orphans. If it were ignored, as inherited from some
        parents, the kernel would not keep exit codes.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))
        ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            ending.remove(signal.SIGHUP)
        before = {signal.SIGTSTP: signal.getsignal(signal.SIGTSTP)}
        before |= {signum: signal.signal(signum, self.interrupt) for signum in ending}
        before |= {signum: signal.signal(signum, self.forward) for signum in FORWARDED}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            os.close(reader)
            os.close(writer)


@dataclasses.dataclass(frozen=True)
class Exit:
    """The end of a process; the launcher lists ends in the order in which it saw them."""

    key: int  # the process's: its rank, or in an elastic job the member's id
    code: int  # negative: killed by that signal
    ended_by_us: bool = False  # after the launcher had ordered it to end
    by_user: bool = False  # because of a signal of the user

    def __str__(self) -> str:
        return exit_text(self.code)


def dated(record: FailureRecord, now: float) -> FailureRecord:
    """Return the failure record of an `Exited` event, whose time is its age, with the time on this host's clock.

    Args:
        now: this host's time, in seconds since the epoch.
    """
    return dataclasses.replace(record, when=now - record.when)


@dataclasses.dataclass(frozen=True)
class Cause:
    """The first failure, and the ranks that ended because of it."""

    exit: Exit
    record: FailureRecord | None
    consequences: tuple[int, ...]
    alike: tuple[int, ...] = ()  # other ranks that have printed the same traceback, or none and have the same exit code
    others: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)  # keys, by reason: failed by themselves

    def with_tracebacks(self, exits: Sequence[Exit], records: Mapping[int, FailureRecord],
                        tracebacks: Mapping[int, str]) -> Cause:
        """Return this with `tracebacks`, the last text on a rank's standard error, where it is one: ranks that failed before
        `init()` have written no record.
        """
        printed = {each.key: tracebacks[each.key] for each in exits if each.code in (1, 2) and each.key in tracebacks}
        own = printed.get(self.exit.key)
        record = self.record or (None if own is None else printed_record(self.exit.key, own))
        alike: list[int] = []
        others: dict[str, list[int]] = {}
        for key, end in sorted((each.key, each) for each in exits if each.key in self.consequences):
            error = None if key in records else printed_record(key, printed.get(key, ""))
            by_itself = key not in records and not end.ended_by_us
            if printed.get(key) == own and (own is not None or (by_itself and not record and end.code == self.exit.code)):
                alike.append(key)
            elif error is not None or by_itself:
                others.setdefault(str(end) if error is None else f"{error.kind}: {error.message}", []).append(key)
        named = {*alike, *(key for keys in others.values() for key in keys)}
        return Cause(self.exit, record, tuple(sorted({*self.consequences} - named)), tuple(alike), others)

    def describe(self, name: str = "", *, repeats: bool = False) -> list[str]:
        """Return the lines that report this failure to the user.

        Args:
            name: how the process is called; default: by its rank.
            repeats: whether a traceback that the rank has printed is printed again.
        """
        who = f"{name or f'rank {self.exit.key}'} failed first"
        if self.alike:
            who = f"ranks {format_ranks([self.exit.key, *self.alike])} failed alike"
        if self.record is not None:
            message = self.record.message.partition("\n")[0]
            lines = [f"{who}: {self.record.kind}: {message} ({self.exit})", *hints(message)]
            if repeats or not self.record.shown:
                lines += self.record.traceback.rstrip().splitlines()
            else:
                lines += rest_of_message(self.record.message)
        else:
            lines = [f"{who}: {self.exit}"]
        lines += [f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)} failed too: {reason}"
                  for reason, ranks in self.others.items()]
        if self.consequences:
            ranks = ", ".join(map(str, self.consequences))
            lines.append(f"{'rank' if len(self.consequences) == 1 else 'ranks'} {ranks} ended as a consequence")
        return lines


def root_cause(exits: Sequence[Exit], records: Mapping[int, FailureRecord]) -> Cause | None:
    """Return the first failure, or None when no rank failed.

    A record that names another rank as its origin is a consequence, even if its rank exited first. Origins may form a chain.
    Among ranks that failed by themselves, the earliest recorded failure wins over the earliest exit. A rank without a record
    that ended by the launcher's signals did not fail, also if it is named: a stalled one, for instance.
    """
    failed = {exit.key: exit for exit in exits if exit.code}
    if not failed:
        return None
    named = sorted((record.when, _origin(rank, records)) for rank, record in records.items()
                  if rank in failed and record.origin != rank)
    blamed = [rank for _, rank in named if rank in failed and (
        records[rank].origin == rank if rank in records else
        not (failed[rank].ended_by_us and failed[rank].code in (-signal.SIGTERM, -signal.SIGKILL)))]
    own = sorted((records[rank].when, rank) for rank in failed if rank in records and records[rank].origin == rank)
    unrecorded = [exit.key for exit in exits if exit.code and exit.key not in records and not exit.ended_by_us]
    first = next(iter((*blamed, *(rank for _, rank in own), *unrecorded, *failed)))
    return Cause(failed[first], records.get(first), tuple(sorted(failed.keys() - {first})))


def _origin(rank: int, records: Mapping[int, FailureRecord]) -> int:
    """Follow the records' origins from `rank` to the last rank; of two ranks that name each other, return one."""
    passed = {rank}
    while rank in records and records[rank].origin not in passed:
        rank = records[rank].origin
        passed.add(rank)
    return rank


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a job has ended.

    Attributes:
        code: hvdrun's exit code.
        lines: for the user.
        key: of the process that failed first; -1 for none in particular.
        reason: of the failure; "" if there was none.
        others: the keys of processes that failed by themselves, too.
    """

    code: int
    lines: Sequence[str] = ()
    key: int = -1
    reason: str = ""
    others: Sequence[int] = ()


def verdict_on_signal(ending: Ending, exits: Sequence[Exit], rank_of: Callable[[int], int] = int) -> Verdict | None:
    """Return how a job has ended by a signal of the user: with 128 + its number, or with 137 where processes were killed
    when the grace was over. None if there was no signal, or if it came after a failure.

    Args:
        rank_of: returns a process's rank, by its key.
    """
    if not ending.user_signal or ending.came_late:
        return None
    killed = format_ranks(rank_of(each.key) for each in exits if each.by_user and each.code == -signal.SIGKILL)
    how = "all ranks ended in time"
    if killed:
        how = f"killed after {ending.grace:g} s (--grace)" if ending.is_grace_over else "killed by a second signal"
        how += f": ranks {killed}"
    code = signal.SIGKILL if killed and ending.is_grace_over else ending.user_signal
    return Verdict(128 + code, [f"ended by {signal.Signals(ending.user_signal).name}; {how}"])


def verdict(end: EndJob | None, exits: Sequence[Exit], records: Mapping[int, FailureRecord], *,
            lost: Sequence[str] = (), problem: str = "", name: Callable[[int], str] = lambda key: "", worlds: int = 1,
            one_world: bool = True, tracebacks: Mapping[int, str] | None = None) -> Verdict:
    """Return how a job has ended that no signal of the user has ended. The first that applies:

    | what has happened | code |
    |---|---|
    | all have finished | 0; `RESULTS_LOST` where their results could not be kept |
    | not elastic: a host was lost, before a process had failed by itself | 1 |
    | a failure is the reason of the end | its own |
    | any other reason: too few ranks, no progress | that of `EndJob` |

    Args:
        end: the authority's command, which there is if no signal has ended the job.
        exits: all ends of processes, in the order in which they were seen.
        records: by the keys of processes.
        lost: why hosts were lost, in a job that is not elastic.
        problem: why results could not be kept.
        name: returns how a process is called, by its key; default: by its rank.
        worlds: how many there were.
        tracebacks: see `Cause.with_tracebacks`.
    """
    assert end is not None
    if end.code == 0:
        return Verdict(RESULTS_LOST, [problem]) if problem else Verdict(0)
    went_on = worlds > 1  # else it has ended like any other job
    cause = root_cause(_to_blame(end, exits, records) if went_on else exits, records)
    if lost and (cause is None or cause.exit.ended_by_us or cause.record is not None):
        failed = format_ranks(each.key for each in exits if each.code)
        return Verdict(1, [*lost, *([f"ranks {failed} ended as a consequence"] if exits else [])], -1, "; ".join(lost))
    if cause is not None and not one_world and cause.exit.ended_by_us and cause.record is None:
        cause = None  # it was ended because of the reason
    is_its_code = cause is not None and (one_world or end.code in {shell_code(each.code) for each in exits})
    lines = [end.reason] if went_on or end.ends_healthy or not is_its_code else []
    if cause is None:
        return Verdict(end.code, lines, -1, end.reason)
    cause = dataclasses.replace(cause, consequences=()) if went_on else (  # of other worlds, whose ranks were others
        cause.with_tracebacks(exits, records, tracebacks or {}))
    described = cause.describe(name(cause.exit.key), repeats=went_on)
    return Verdict(shell_code(cause.exit.code) if is_its_code else end.code, [*lines, *described],
                   cause.exit.key, described[0], tuple(key for keys in cause.others.values() for key in keys))


def _to_blame(end: EndJob, exits: Sequence[Exit], records: Mapping[int, FailureRecord]) -> list[Exit]:
    """Return the ends of processes that can be the cause of the end of a job that had gone on before."""
    if end.member is None:
        return [each for each in exits if not each.ended_by_us]
    origin = records[end.member].origin if end.member in records else end.member
    return [each for each in exits if each.key in (end.member, origin)]


@dataclasses.dataclass
class WorkerProcess:
    """A process of the job.

    Attributes:
        rank: in the last world that it was in; -1 for none.
        record: of its failure, if it has written one.
        problem: why it was ended; "" if it was not.
    """

    machine: str
    host: str
    rank: int = -1
    record: FailureRecord | None = None
    problem: str = ""


class WorkerProcesses(dict[int, WorkerProcess]):
    """All processes that there have been, by their keys.

    Args:
        names_hosts: whether `name` has the host although there is only one.

    Attributes:
        running: the keys of those that have not ended.
        exits: their ends, in the order in which they were seen.
    """

    def __init__(self, *, names_hosts: bool = False) -> None:
        super().__init__()
        self._names_hosts = names_hosts
        self.running: set[int] = set()
        self.exits: list[Exit] = []

    def begin_world(self, world: Sequence[int]) -> dict[int, str]:
        """Give processes new ranks; return the host of each."""
        for rank, key in enumerate(world):
            self[key].rank = rank
        return {rank: self[key].host for rank, key in enumerate(world)}

    def on(self, machine: str) -> list[int]:
        """Return the processes that run on a machine."""
        return sorted(key for key in self.running if self[key].machine == machine)

    def records(self) -> dict[int, FailureRecord]:
        """Return the records of failures."""
        return {key: process.record for key, process in self.items() if process.record is not None}

    def rank_of(self, key: int) -> int:
        """Return a process's rank in the last world that it was in; -1 for none."""
        return self[key].rank

    def name(self, key: int) -> str:
        """Return how a process is called in a message."""
        process = self[key]
        where = f" on {process.host}" if self._names_hosts or len({each.host for each in self.values()}) > 1 else ""
        number = "" if process.rank == key else f" (process {key})"
        return (f"rank {process.rank}{number}" if process.rank >= 0 else f"new process {key}") + where
