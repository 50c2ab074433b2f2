"""A host leader's role: let a host speak to the coordinator with one voice. Pure.

What all ranks of the host say alike goes up once: buckets that are ready on all of them, rounds that all of them closed.
Everything else passes through, rank by rank. So in steady state the coordinator's work for a training step grows with
hosts x buckets, whatever the number of ranks and tensors.

Rules kept here
- What one rank said goes up in the order in which it said it, except that buckets and closings wait for the host's others.
- A closed round goes up after everything that belongs to it, so it waits while a bucket of the round is held back.
- When a layout is evicted, what was held back of its buckets goes up rank by rank: some rank of the host will never
  report that bucket. The leader sees the eviction before any of its ranks applies it, because decisions pass through it.
- When a rank of the host is asked for an account, what is held back goes up rank by rank too: somebody waits for one of
  them, and a stall report is to name that one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hvdlite.core.types import Collective
from hvdlite.negotiation.messages import BucketReady, Closing, Decision, ErrorKind, HostReport, Layout, Report
from hvdlite.negotiation.process_sets import ProcessSetTable


class Leader:
    """Merges the reports of one host's ranks.

    Args:
        ranks: the host's.
        size: ranks of the job.
    """

    def __init__(self, ranks: Iterable[int], size: int, *, epoch: int = 0) -> None:
        self.ranks = tuple(ranks)
        self._process_sets = ProcessSetTable(size)
        self.epoch = epoch
        self._applied = dict.fromkeys(self.ranks, 0)
        self._held: dict[int, dict[int, BucketReady]] = {}  # bucket -> rank -> report; invariant: never all ranks
        self._closed: dict[Closing, int] = {}  # how many ranks closed a round; likewise
        self._layouts: dict[int, Layout] = {}  # in use
        self._sets: dict[int, tuple[str, int]] = {}  # bucket -> its set and process set, as long as a rank may name it
        self._opened: dict[tuple[int, int], int] = {}  # (bucket, round) that goes up rank by rank -> ranks yet to report it
        self._ended: list[tuple[int, Layout]] = []  # evicted by that decision, which some rank has not applied
        self._singles: list[tuple[int, Report]] = []  # to go up; likewise below
        self._buckets: list[BucketReady] = []
        self._closings: list[Closing] = []
        self._lost: list[tuple[int, str]] = []

    def receive(self, rank: int, report: Report) -> None:
        """Take in what a rank of the host says."""
        self._applied[rank] = report.applied
        if report.requests or report.stale or report.aside or report.leaving or report.failure is not None:
            self._singles.append((rank, msgspec.structs.replace(report, buckets=(), closings=())))
        for ready in report.buckets:
            if ready.closes:
                label, process_set = self._sets[ready.bucket]
                self._close(Closing(label, ready.round, process_set))
            if any(bucket.bucket == ready.bucket for _, layout in self._ended for bucket in layout.buckets):
                self._pass_on(rank, ready)
            elif (ready.bucket, ready.round) in self._opened:
                self._pass_on(rank, ready)
                self._count_down(ready.bucket, ready.round, 1)
            else:
                self._hold(rank, ready)
        for closing in report.closings:
            self._close(closing)
        self._forget()

    def lose(self, rank: int, reason: str) -> None:
        """A rank of the host is gone; whether it had left, the coordinator knows."""
        self._lost.append((rank, reason))

    def watch(self, decision: Decision) -> None:
        """Take in a decision on its way to the host's ranks, before they get it."""
        if not set(self.ranks).isdisjoint(decision.inquiries):
            self._open()
        for layout in decision.learned:
            self._sets.update((bucket.bucket, (layout.label, bucket.response.process_set)) for bucket in layout.buckets)
            self._layouts[layout.layout] = layout
        for number in decision.evicted:
            ended = self._layouts.pop(number)
            self._ended.append((decision.sequence, ended))
            for bucket in ended.buckets:
                for rank, ready in self._held.pop(bucket.bucket, {}).items():
                    self._pass_on(rank, ready)
                self._opened = {key: count for key, count in self._opened.items() if key[0] != bucket.bucket}
        for response in decision.responses:
            if response.error is ErrorKind.NONE and response.collective is Collective.ADD_PROCESS_SET:
                self._process_sets.add(response.members)
            elif response.error is ErrorKind.NONE and response.collective is Collective.REMOVE_PROCESS_SET:
                self._process_sets.remove(response.rows[0])

    def report(self) -> HostReport | None:
        """Return what is to go up, or None."""
        closings = [closing for closing in self._closings if not self._holds_back(closing)]
        if not (self._singles or self._buckets or closings or self._lost):
            return None
        report = HostReport(min(self._applied.values()), tuple(self._singles), tuple(self._buckets), tuple(closings),
                            tuple(self._lost))
        self._singles.clear()
        self._buckets.clear()
        self._lost.clear()
        self._closings = [closing for closing in self._closings if closing not in closings]
        return report

    def check_invariants(self) -> None:
        """Fail when something is held back that all ranks have said."""
        assert all(0 < len(held) < self._count(self._sets[bucket][1]) for bucket, held in self._held.items())
        assert all(0 < count < self._count(closing.process_set) for closing, count in self._closed.items())
        assert all(count > 0 for count in self._opened.values())
        assert self._held.keys().isdisjoint(bucket for bucket, _ in self._opened)

    def _pass_on(self, rank: int, ready: BucketReady) -> None:
        alone = msgspec.structs.replace(ready, closes=False)  # that is counted here
        self._singles.append((rank, Report(self.epoch, self._applied[rank], buckets=(alone,))))

    def _open(self) -> None:
        """Let go of everything that is held back."""
        for bucket, held in self._held.items():
            for rank, ready in held.items():
                self._pass_on(rank, ready)
                self._opened.setdefault((bucket, ready.round), self._count(self._sets[bucket][1]))
            self._count_down(bucket, ready.round, len(held))
        self._held.clear()

    def _count_down(self, bucket: int, round: int, reported: int) -> None:
        self._opened[bucket, round] -= reported
        if not self._opened[bucket, round]:
            del self._opened[bucket, round]

    def _forget(self) -> None:
        """Drop what no rank of the host can name any more."""
        while self._ended and self._ended[0][0] <= min(self._applied.values()):
            for bucket in self._ended.pop(0)[1].buckets:
                del self._sets[bucket.bucket]

    def _holds_back(self, closing: Closing) -> bool:
        return any(ready.round <= closing.round for bucket, held in self._held.items()
                   if self._sets[bucket][0] == closing.label for ready in held.values())

    def _hold(self, rank: int, ready: BucketReady) -> None:
        held = self._held.setdefault(ready.bucket, {})
        held[rank] = ready
        if len(held) < self._count(self._sets[ready.bucket][1]):
            return
        del self._held[ready.bucket]
        missing = set(ready.missing).intersection(*(other.missing for other in held.values())) if ready.missing else ()
        self._buckets.append(BucketReady(ready.bucket, ready.round, tuple(sorted(missing))))

    def _count(self, process_set: int) -> int:
        """Return how many of the host's ranks belong to a process set."""
        return len(self._process_sets.among(process_set, self.ranks))

    def _close(self, closing: Closing) -> None:
        count = self._closed.get(closing, 0) + 1
        if count < self._count(closing.process_set):
            self._closed[closing] = count
        else:
            self._closed.pop(closing, None)
            self._closings.append(closing)
