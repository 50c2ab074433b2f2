"""Shares of global batches: fixed ones, and "auto" ones, which follow the ranks' speeds.

Rules of "auto"
- A rank measures its own seconds for a row: of steps, without waits for collectives. The median of `EVERY` steps counts, so
  that a step that compiles, evaluates or writes a checkpoint does not mislead.
- When the training loop has finished `EVERY` more batches, ranks begin an allgather of what they have measured, and go on.
  All compute the new shares from the same numbers (`balanced`); nobody announces a decision.
- The number of a batch decides its shares. A decision after n batches counts from batch n + ahead on. Who makes such a batch
  waits for the decision. The loop gets as far as n in any case: it makes fewer than `ahead` batches itself before it
  finishes them.
- In an elastic job each world has shares of its own. They begin with the speeds that ranks have measured in earlier worlds.
"""

from __future__ import annotations

import collections
import logging
import math
import numbers
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from hvdlite import api
from hvdlite.core.errors import MismatchError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.handoff.handle import Handle
from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite.training.mirrored.shards import Split, equal_split, rows_of_ranks

_log = logging.getLogger("hvdlite")
T = TypeVar("T")
AUTO: Final = "auto"
EVERY: Final = 50
"""Batches from one decision to the next."""
AHEAD: Final = 8
"""Batches from a decision to the first one that follows it, beyond those that a loop makes before they are finished."""
LEAST_GAIN: Final = 0.03
"""By how much the slowest rank's time must exceed what it would be, for shares to change."""
LEAST_ERRORS: Final = 4.0
"""The same beyond noise, in standard errors of what was measured."""
MOST_CHANGE: Final = 2.0
"""The factor by which a decision changes a rank's rows at most."""


class Measured(NamedTuple):
    """A rank's seconds for a row, their standard error relative to them, and its rows in a batch; NaN: no batch."""

    seconds: float = math.nan
    error: float = math.nan
    rows: float = math.nan

    @classmethod
    def of(cls, batches: Sequence[tuple[float, float]]) -> Measured:
        """Return the medians over batches of (seconds for a row, rows).

        A median's variance is pi / 2 times the mean's; the deviation is 1.4826 times the median one: for normal noise.
        """
        if not batches:
            return cls()
        seconds, rows = (statistics.median(column) for column in zip(*batches, strict=True))
        deviation = 1.4826 * statistics.median(abs(each - seconds) for each, _ in batches)
        return cls(seconds, deviation / seconds * math.sqrt(math.pi / 2 / len(batches)), rows)


def balanced(measured: Sequence[Measured], limits: tuple[int, ...] | None = None) -> tuple[float, ...] | None:
    """Return shares with which all ranks take equally long; None if the present ones are good enough, or nothing is known.

    A rank's share is its speed in rows a second. Of seconds = a + b * rows, the distance from equal times shrinks to
    a / (a + b * rows) of it with each decision: never too far.
    """
    if not all(each.seconds > 0 and each.rows > 0 for each in measured):
        return None
    rows = round(math.fsum(each.rows for each in measured))
    scale = rows / math.fsum(1 / each.seconds for each in measured)
    shares = tuple(min(max(scale / each.seconds, each.rows / MOST_CHANGE), each.rows * MOST_CHANGE) for each in measured)
    now = max(each.seconds * each.rows for each in measured)
    then = max(each.seconds * count for each, count in zip(measured, rows_of_ranks(rows, shares, limits), strict=True))
    return shares if now > then * (1 + LEAST_GAIN + LEAST_ERRORS * max(each.error for each in measured)) else None


class Shares:
    """The shares of a strategy's replicas, or of the ranks of an elastic world.

    Args:
        asked: None for equal shares, "auto", a number for each replica, or for each replica of a host, by the host's name.
        max_rows: the most rows of a replica, or a list with a number for each; None without a limit.
            All numbers may be NumPy's, lists arrays.
        compare: whether ranks compare what they ask for; they make this together then, also those that ask for nothing.
        is_elastic: Like `shares_asked`.
        prefetched: the most batches that this rank's workers prefetch, beside those of `begin`.
        before: of an earlier world, if this rank has been in one.

    Attributes:
        is_auto: whether they follow speeds.
        first: the split of the first batches; else of all.
        speed: of this rank in rows a second, when it was last measured; NaN before.
        changed: notified when those who wait for a decision have to look again.

    Raises:
        ValueError: for anything else, and for other hosts than there are.
        MismatchError: on all ranks, when they ask for different shares.
    """

    def __init__(self, replicas: ReplicaGroup, asked: Any = None, max_rows: int | Sequence[int] | None = None, *,
                 compare: bool = True, is_elastic: bool = False, prefetched: int = 0, before: Shares | None = None) -> None:
        self._replicas = replicas
        asked, max_rows = plain(asked), plain(max_rows)
        self.is_auto = asked == AUTO and replicas.size > 1
        self.first = equal_split(replicas.replica_id, replicas.size)
        self.speed: float = math.nan if before is None else before.speed
        self._ahead = AHEAD + prefetched
        if replicas.size > 1 and compare:
            own = f"shares={asked!r}, max_rows={max_rows!r}", socket.gethostname(), self.speed, self._ahead
            everywhere = replicas.allgather_object(own, "shares")
            for replica_id, (theirs, *_) in enumerate(everywhere):
                if theirs != everywhere[0][0]:
                    raise MismatchError(f"ask for the same shares on all ranks: replica 0 has {everywhere[0][0]}, replica "
                                        f"{replica_id} {theirs}")
            _, hosts, speeds, ahead = zip(*everywhere, strict=True)
            self._ahead = max(ahead)
            shares = speeds if self.is_auto else shares_asked(asked, hosts, is_elastic=is_elastic)
            lacking = [rank for rank, share in enumerate(shares) if math.isnan(share)]
            if lacking and not self.is_auto and replicas.replica_id == 0:
                _log.warning("shares=%r have no number for ranks %s, on %s: they get the mean of the others' shares", asked,
                             lacking, sorted({hosts[rank] for rank in lacking}))
            self.first = self.first._replace(shares=with_means(shares), limits=limits_asked(max_rows, replicas.size))
        self.changed = threading.Condition()
        self._splits = [(0, self.first)]  # from which number of batches on
        self._finished = 0  # batches
        self._measured: list[tuple[float, float]] = []  # since the last decision
        self._begun: collections.deque[Handle] = collections.deque()  # allgathers of decisions that are not made yet
        self._decided = 0  # decisions

    def begin(self, early: int = 0) -> SharesPass:
        """Begin a pass over a source of which the loop itself makes at most so many batches before they are finished."""
        return SharesPass(self, self._finished - early - self._ahead)

    def at(self, number: int, caller: SharesPass) -> Split:
        """Return the split after `number` batches; waits for the decisions until then, unless the caller has ended."""
        if not self.is_auto:
            return self.first
        with self.changed:
            while (self._decided + 1) * EVERY <= number:
                self.changed.wait_for(lambda: self._begun or caller.has_ended)
                if caller.has_ended:
                    break
                measured = [Measured(*map(float, each)) for each in self._begun[0].wait()]  # a wait may be interrupted
                shares = balanced(measured, self.first.limits)
                if shares is not None:
                    self._splits.append(((self._decided + 1) * EVERY, self.first._replace(shares=shares)))
                self._decided += 1
                self._begun.popleft()
            return next((split for since, split in reversed(self._splits) if since <= number), self.first)

    def finished(self, count: int, seconds: float, rows: int) -> None:
        """The training loop has finished so many batches with so many rows of this rank; 0 seconds: not measured."""
        if seconds > 0 and rows > 0:
            self._measured.append((seconds / rows, rows / count))
        before, self._finished = self._finished, self._finished + count
        for _ in range(self._finished // EVERY - before // EVERY):
            measured, self._measured = Measured.of(self._measured), []
            self.speed = 1 / measured.seconds if measured.seconds > 0 else self.speed
            handle = self._replicas.runtime.allgather(self._replicas.name("shares"), np.array([measured]),
                                                      process_set=self._replicas.process_set)
            with self.changed:
                self._begun.append(handle)
                self.changed.notify_all()

    def clock(self) -> float:
        """Return the seconds of the training loop without its waits for collectives, since some time."""
        return time.monotonic() - self._replicas.runtime.progress.blocked


def shares_of_world(asked: Any, before: Shares | None, prefetched: int = 0) -> Shares:
    """Return the shares of the ranks of an elastic job's present world; see `Shares`."""
    replicas = ReplicaGroup(api.runtime(), GLOBAL_PROCESS_SET_ID, "elastic")
    return Shares(replicas, asked, is_elastic=True, prefetched=prefetched, before=before)


class SharesPass:
    """One iteration over a source of global batches, which are made in order, in any thread.

    Args:
        begin: the number of its first batch, less those ahead.

    Attributes:
        has_ended: whether nobody uses what is made from now on.
    """

    def __init__(self, shares: Shares, begin: int) -> None:
        self.has_ended = False
        self._shares, self._begin = shares, begin
        self._made = self._finished = 0  # batches
        self._rows: collections.deque[int] = collections.deque()  # of this rank, in those that are made and not finished
        self._since: float | None = None  # when the last one was finished

    def own(self, rows: int) -> slice:
        """Return this rank's rows of the next batch, which is made now."""
        mine = self._shares.at(self._begin + self._made, self).own(rows)
        self._made += 1
        self._rows.append(mine.stop - mine.start)
        return mine

    def taken(self, rows: Sequence[T]) -> Sequence[T]:
        """Return this rank's rows of the next batch, given all of them."""
        return rows[self.own(len(rows))]

    def weight(self, rows: int) -> float:
        """Return the weight of this rank's mean in the first batch that is not finished; see `Split`."""
        return self._shares.at(self._begin + self._finished, self).weight(rows)

    def finished(self, count: int = 1) -> None:
        """The training loop has finished the next batches, and does nothing else before those that follow."""
        self._finished += count
        if self._shares.is_auto:
            since, self._since = self._since, self._shares.clock()
            rows = sum(self._rows.popleft() for _ in range(min(count, len(self._rows))))
            self._shares.finished(count, 0.0 if since is None else self._since - since, rows)

    def pause(self) -> None:
        """The training loop does something else before the next batches."""
        self._since = None

    def end(self) -> None:
        """Nobody uses what is made from now on: its maker must not wait."""
        with self._shares.changed:
            self.has_ended = True
            self._shares.changed.notify_all()


def plain(asked: Any) -> Any:
    """Return what is asked of `Shares` in one form: Python's numbers, floats if need be, lists, and dicts in order."""
    if isinstance(asked, np.ndarray):
        asked = asked.tolist()
    if isinstance(asked, Mapping):
        return {host: plain(each) for host, each in sorted(asked.items(), key=lambda item: str(item[0]))}
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        return [plain(each) for each in asked]
    if not isinstance(asked, numbers.Real):
        return asked
    number = float(asked)
    return int(number) if number.is_integer() else number


def with_means(shares: Sequence[float]) -> tuple[float, ...]:
    """Return shares with the mean of the others in place of NaN."""
    mean = statistics.fmean([each for each in shares if not math.isnan(each)] or [1.0])
    return tuple(mean if math.isnan(each) else float(each) for each in shares)


def shares_asked(asked: Any, hosts: Sequence[str], *, is_elastic: bool = False) -> tuple[float, ...]:
    """Return the share of each replica as asked of `Shares`.

    Args:
        hosts: of the replicas.
        is_elastic: whether other worlds have other ranks and hosts: there may be numbers for some that are not here, and
            those without one get NaN.

    Raises:
        ValueError: for anything else.
    """
    if asked is None or asked == AUTO:
        return (1.0,) * len(hosts)
    numbers = given = asked
    if isinstance(asked, Mapping):
        if set(asked) != set(hosts) and not is_elastic:
            raise ValueError(f"shares by host name {sorted(map(str, asked))}, but the ranks are on {sorted(set(hosts))}: "
                             "give each of these a number")
        numbers, given = list(asked.values()), [asked.get(host, math.nan) for host in hosts]
    if isinstance(numbers, str) or not isinstance(numbers, Sequence) or not numbers \
            or not (is_elastic or len(given) == len(hosts)) or not all(
                isinstance(each, (int, float)) and not isinstance(each, bool) and 0 < each < math.inf for each in numbers):
        raise ValueError(f"shares are None, \"{AUTO}\", a list of {'' if is_elastic else f'{len(hosts)} '}positive numbers, "
                         f"one a rank, or a dict of them by host; not {asked!r}")
    return tuple(map(float, [*given, *(math.nan for _ in hosts)][:len(hosts)]))


def limits_asked(max_rows: Any, size: int) -> tuple[int, ...] | None:
    """Return the most rows of each replica as asked of `Shares`, or raise `ValueError`."""
    limits = tuple(max_rows) if isinstance(max_rows, Sequence) else (max_rows,) * size
    if max_rows is None:
        return None
    if len(limits) != size or not all(isinstance(each, int) and each > 0 for each in limits):
        raise ValueError(f"max_rows is the most rows of a rank, or a list of {size} numbers, one a rank; not {max_rows!r}")
    return limits
