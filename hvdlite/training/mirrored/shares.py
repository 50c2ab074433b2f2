"""Shares of global batches: fixed ones, and those that follow the ranks' speeds.

Rules of shares that follow speeds ("auto")
- Each rank measures its own seconds for a row: the time of a step without waits for collectives. Of `EVERY` steps the median
  counts, so a first step that compiles, an evaluation or a checkpoint does not mislead.
- After every `EVERY` batches that the training loop has finished, ranks begin an allgather of what they have measured, and
  go on. All ranks compute the new shares from the same numbers (`balanced`), so nobody has to announce a decision.
- The number of a batch decides its shares. A decision after batch n counts for batches from number n + ahead on, where
  `ahead` is more than a source prefetches. Who makes such a batch before the decision is known waits for it; its rank can
  still finish batch n, because all batches below n + ahead are there already.
"""

from __future__ import annotations

import collections
import math
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from hvdlite.core.errors import MismatchError
from hvdlite.handoff.handle import Handle
from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite.training.mirrored.shards import Split, equal_split, rows_of_ranks

AUTO: Final = "auto"
EVERY: Final = 50
"""Batches from one decision to the next."""
AHEAD: Final = 8
"""Batches from a decision to the first one that follows it, beyond those that a source prefetches as it is known to."""
LEAST_GAIN: Final = 0.03
"""By how much the slowest rank's time must exceed what it would be, for shares to change."""
LEAST_ERRORS: Final = 4.0
"""The same beyond noise, in standard errors of what was measured."""
MOST_CHANGE: Final = 2.0
"""The factor by which a decision changes a rank's rows at most."""


class Measured(NamedTuple):
    """What a rank has measured over some batches.

    Attributes:
        seconds: for a row, the median; NaN when there was no batch.
        error: the standard error of the seconds, relative to them.
        rows: of this rank in a batch, the median.
    """

    seconds: float = math.nan
    error: float = math.nan
    rows: float = math.nan

    @classmethod
    def of(cls, batches: Sequence[tuple[float, float]]) -> Measured:
        """Return what was measured, given seconds for a row and rows of each batch.

        The standard error is that of a median, pi / 2 times the variance of the mean, for normally distributed times whose
        standard deviation is 1.4826 times the median absolute deviation.
        """
        if not batches:
            return cls()
        seconds = statistics.median(each for each, _ in batches)
        deviation = 1.4826 * statistics.median(abs(each - seconds) for each, _ in batches)
        return cls(seconds, deviation / seconds * math.sqrt(math.pi / 2 / len(batches)),
                   statistics.median(rows for _, rows in batches))


def balanced(measured: Sequence[Measured], limits: tuple[int, ...] | None = None) -> tuple[float, ...] | None:
    """Return shares with which all ranks take equally long; None if the present ones are good enough, or nothing is known.

    A rank's share is its speed, in rows a second. If a part of its time does not depend on the rows, this changes too little
    and never too much: for seconds = a + b * rows, the distance from equal times shrinks to a / (a + b * rows) of it.

    Args:
        measured: by each rank, with its present rows.
        limits: the most rows of each rank.
    """
    if not all(each.seconds > 0 and each.rows > 0 for each in measured):
        return None
    rows = round(math.fsum(each.rows for each in measured))
    scale = rows / math.fsum(1 / each.seconds for each in measured)
    shares = tuple(min(max(scale / each.seconds, each.rows / MOST_CHANGE), each.rows * MOST_CHANGE) for each in measured)
    now = max(each.seconds * each.rows for each in measured)
    then = max(each.seconds * count
               for each, count in zip(measured, rows_of_ranks(rows, shares, limits), strict=True))
    return shares if now > then * (1 + LEAST_GAIN + LEAST_ERRORS * max(each.error for each in measured)) else None


class Shares:
    """The shares of a strategy's replicas.

    Args:
        asked: None for equal shares, "auto", a number for each replica, or for each replica of a host, by the host's name.
        max_rows: the most rows of a replica, or a list with a number for each; None without a limit.

    Attributes:
        follow_speed: whether they are "auto".
        first: the split of the first batches; of all, unless shares follow speeds.
        changed: notified when somebody who waits for a decision has to look again.

    Raises:
        ValueError: for anything else; for hosts of which none are given, or that there are not.
        MismatchError: on all ranks, when they ask for different shares.
    """

    def __init__(self, replicas: ReplicaGroup, asked: Any = None, max_rows: int | Sequence[int] | None = None) -> None:
        self._replicas = replicas
        self.follow_speed = asked == AUTO and replicas.size > 1
        self.first = equal_split(replicas.replica_id, replicas.size)
        if replicas.size > 1 and not (asked is None and max_rows is None):
            own = f"shares={asked!r}, max_rows={max_rows!r}", socket.gethostname()
            everywhere = replicas.allgather_object(own, "shares")
            for replica_id, (theirs, _) in enumerate(everywhere):
                if theirs != everywhere[0][0]:
                    raise MismatchError(f"replica 0 has {everywhere[0][0]}, replica {replica_id} {theirs}: ask for the same "
                                        "shares on all ranks")
            self.first = self.first._replace(shares=shares_asked(asked, [host for _, host in everywhere]),
                                             limits=limits_asked(max_rows, replicas.size))
        self.changed = threading.Condition()
        self._splits = [(0, self.first)]  # from which number of batches on
        self._finished = 0  # batches
        self._measured: list[tuple[float, float]] = []  # seconds for a row, and rows, of batches since the last decision
        self._begun: collections.deque[Handle] = collections.deque()  # the allgathers of decisions that are not made yet
        self._decided = 0  # decisions

    def begin(self, prefetched: int = 0) -> SharesPass:
        """Begin a pass over a source that makes at most so many batches, and `AHEAD`, before they are finished.

        In threads of its own a source may make more of them.
        """
        return SharesPass(self, self._finished, prefetched + AHEAD)

    def at(self, number: int, caller: SharesPass) -> Split:
        """Return the split after `number` batches; waits for the decisions until then, unless the caller has ended."""
        if not self.follow_speed:
            return self.first
        with self.changed:
            while (self._decided + 1) * EVERY <= number:
                self.changed.wait_for(lambda: self._begun or caller.has_ended)
                if caller.has_ended:
                    break
                self._decide([Measured(*map(float, each)) for each in self._begun.popleft().wait()])
            return next((split for since, split in reversed(self._splits) if since <= number), self.first)

    def _decide(self, everywhere: Sequence[Measured]) -> None:
        self._decided += 1
        shares = balanced(everywhere, self.first.limits)
        if shares is not None:
            self._splits.append((self._decided * EVERY, self.first._replace(shares=shares)))

    def finished(self, count: int, seconds: float, rows: int) -> None:
        """The training loop has finished so many batches, with so many rows of this rank; 0 seconds: not measured."""
        if seconds > 0 and rows > 0:
            self._measured.append((seconds / rows, rows / count))
        before, self._finished = self._finished, self._finished + count
        for _ in range(self._finished // EVERY - before // EVERY):
            own, self._measured = np.array([Measured.of(self._measured)]), []
            handle = self._replicas.runtime.allgather(self._replicas.name("shares"), own,
                                                      process_set=self._replicas.process_set)
            with self.changed:
                self._begun.append(handle)
                self.changed.notify_all()

    def clock(self) -> float:
        """Return the seconds of the training loop without its waits for collectives, since some time."""
        return time.monotonic() - self._replicas.runtime.progress.blocked


class SharesPass:
    """One iteration over a source of global batches, which are made in any thread, in order.

    Attributes:
        has_ended: whether nobody uses what is made from now on.
    """

    def __init__(self, shares: Shares, begin: int, ahead: int) -> None:
        self.has_ended = False
        self._shares, self._begin, self._ahead = shares, begin, ahead
        self._rows: dict[int, int] = {}  # of this rank, by index, in batches that are not finished
        self._finished = 0
        self._since: float | None = None  # when the last one was finished

    def split(self, index: int) -> Split:
        """Return the split of the pass's batch number `index`."""
        return self._shares.at(self._begin + index - self._ahead, self)

    def own(self, index: int, rows: int) -> slice:
        """Return this rank's rows of the pass's batch number `index`, which is made now."""
        mine = self.split(index).own(rows)
        if self._shares.follow_speed:
            self._rows[index] = mine.stop - mine.start
        return mine

    def finished(self, count: int = 1) -> None:
        """The training loop has finished the next batches, and comes from there to the end of those that follow."""
        if self._shares.follow_speed:
            now = self._shares.clock()
            since, self._since = self._since, now
            rows = sum(self._rows.pop(index, 0) for index in range(self._finished, self._finished + count))
            self._finished += count
            self._shares.finished(count, 0.0 if since is None else now - since, rows)

    def pause(self) -> None:
        """The training loop does something else before the next batch."""
        self._since = None

    def end(self) -> None:
        """Nobody uses what is made from now on: its maker must not wait."""
        with self._shares.changed:
            self.has_ended = True
            self._shares.changed.notify_all()


def shares_asked(asked: Any, hosts: Sequence[str]) -> tuple[float, ...]:
    """Return the share of each replica.

    Args:
        asked: as for `Shares`.
        hosts: the name of each replica's host.

    Raises:
        ValueError: for anything else.
    """
    if asked is None or asked == AUTO:
        return (1.0,) * len(hosts)
    if isinstance(asked, Mapping):
        if set(asked) != set(hosts):
            raise ValueError(f"shares by host name {sorted(map(str, asked))}, but the ranks are on {sorted(set(hosts))}: "
                             "give each of these a number")
        asked = [asked[host] for host in hosts]
    if isinstance(asked, str) or not isinstance(asked, Sequence) or len(asked) != len(hosts) \
            or not all(isinstance(each, (int, float)) and 0 < each < math.inf for each in asked):
        raise ValueError(f"shares are None, \"{AUTO}\", a list of {len(hosts)} positive numbers, one a rank, or a dict of "
                         f"them by host; not {asked!r}")
    return tuple(map(float, asked))


def limits_asked(max_rows: Any, size: int) -> tuple[int, ...] | None:
    """Return the most rows of each replica; None without a limit.

    Raises:
        ValueError: for something else than a positive number, one for each replica, or None.
    """
    if max_rows is None:
        return None
    limits = tuple(max_rows) if isinstance(max_rows, Sequence) else (max_rows,) * size
    if len(limits) != size or not all(isinstance(each, int) and each > 0 for each in limits):
        raise ValueError(f"max_rows is the most rows of a rank, or a list of {size} numbers, one a rank; not {max_rows!r}")
    return limits
