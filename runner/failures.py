"""Finds the failure that ended a job, from the exit codes and the failure records of its ranks. Pure."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.core.launch_contract import FailureRecord


@dataclasses.dataclass(frozen=True)
class Exit:
    """The end of a rank's process; the launcher lists ends in the order in which it saw them."""

    rank: int
    code: int  # negative: killed by that signal
    ended_by_us: bool = False  # after the launcher had told it to end

    @property
    def failed(self) -> bool:
        """Whether it failed."""
        return self.code != 0

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it: 128 + n for signal n."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by signal {-self.code} ({signal.Signals(-self.code).name})"
        except ValueError:
            return f"killed by signal {-self.code}"


def record_of(fields: Mapping[str, Any], now: float) -> FailureRecord:
    """Return the failure record of an `Exited` event, with its time on this host's clock.

    Args:
        now: this host's time, in seconds since the epoch.
    """
    return FailureRecord(**{**fields, "when": now - float(fields["when"])})


@dataclasses.dataclass(frozen=True)
class Cause:
    """The first failure, and the ranks that ended because of it."""

    exit: Exit
    record: FailureRecord | None
    consequences: tuple[int, ...]

    def describe(self, host: str = "", name: str = "", *, repeats: bool = False) -> list[str]:
        """Return the lines that report this failure to the user.

        Args:
            repeats: whether a traceback that the rank has printed is printed again.
            host: the rank's host, if the message should name it.
            name: how the process is called; default: by its rank.
        """
        who = name or f"rank {self.exit.rank}"
        who += f" on {host}" if host else ""
        if self.record is not None:
            message = self.record.message.partition("\n")[0]
            lines = [f"{who} failed first: {self.record.kind}: {message} ({self.exit})"]
            if repeats or not self.record.shown:
                lines += self.record.traceback.rstrip().splitlines()
        else:
            lines = [f"{who} failed first: {self.exit}"]
        if self.consequences:
            ranks = ", ".join(map(str, self.consequences))
            lines.append(f"{'rank' if len(self.consequences) == 1 else 'ranks'} {ranks} ended as a consequence")
        return lines


def root_cause(exits: Sequence[Exit], records: Mapping[int, FailureRecord]) -> Cause | None:
    """Return the first failure, or None when no rank failed.

    A record that names another rank as its origin is a consequence, even if its rank exited first. Origins may form a chain.
    Among ranks that failed by themselves, the earliest recorded failure wins over the earliest exit. A rank without a record
    that ended by the launcher's SIGTERM did not fail, also if it is named: a stalled one, for instance.
    """
    failed = {exit.rank: exit for exit in exits if exit.failed}
    if not failed:
        return None
    told = sorted((record.when, _origin(rank, records)) for rank, record in records.items()
                  if rank in failed and record.origin != rank)
    blamed = [rank for _, rank in told if rank in failed and (
        records[rank].origin == rank if rank in records else
        not (failed[rank].ended_by_us and failed[rank].code == -signal.SIGTERM))]
    own = sorted((records[rank].when, rank) for rank in failed if rank in records and records[rank].origin == rank)
    unrecorded = [exit.rank for exit in exits if exit.failed and exit.rank not in records and not exit.ended_by_us]
    first = next(iter((*blamed, *(rank for _, rank in own), *unrecorded, *failed)))
    return Cause(failed[first], records.get(first), tuple(sorted(failed.keys() - {first})))


def _origin(rank: int, records: Mapping[int, FailureRecord]) -> int:
    """Follow the records' origins from `rank` to the last rank; of two ranks that name each other, return one."""
    passed = {rank}
    while rank in records and records[rank].origin not in passed:
        rank = records[rank].origin
        passed.add(rank)
    return rank
