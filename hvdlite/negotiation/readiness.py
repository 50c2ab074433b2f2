"""What the ranks of a scope report, until all of them have. Pure.

Rank 0 has an `Aggregator` for all ranks of the job, and a host's leader has one for the ranks of its host. What is complete
is answered at rank 0, and forwarded as one at the host. Both follow the same rules: what a process set, a join, a layout and
the end of a gradient set mean for what waits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective
from hvdlite.negotiation.gathering import Gathered, Gathering, Ranks
from hvdlite.negotiation.layouts import LayoutTable
from hvdlite.negotiation.messages import (
    Bucket,
    BucketReady,
    Decision,
    ErrorKind,
    Key,
    Layout,
    Request,
    Retired,
    RoundDone,
    Wait,
)
from hvdlite.negotiation.process_sets import ProcessSetTable


class Joins:
    """The ranks that have joined: they have no more data and wait until all ranks have called `join()`.

    The last rank to join is announced to all. When nothing was reduced without a joined rank since the join before, that
    join's last rank is named again: its parameters are as new as any other rank's, and nested joins (of several optimizers)
    name the same rank.

    Attributes:
        ranks: those that have joined, in order.
        was_missed: something was carried out without a rank that has joined.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, None] = {}
        self.was_missed = False
        self._last: int | None = None

    def name_last(self) -> int:
        """Return the last rank of the join that is complete now."""
        if self.was_missed or self._last is None:
            self._last = next(reversed(self.ranks))
        return self._last

    def complete(self) -> None:
        """All ranks have joined; they all take part again."""
        self.ranks.clear()
        self.was_missed = False


class Aggregator:
    """What some ranks of a scope have reported, and others have not.

    Attributes:
        scope: the ranks whose reports come here.
        process_sets: who belongs to which process set.
        joins: which ranks have joined. Only a join itself waits for them.
        layouts: which buckets there are.
        requests: the tensors.
        buckets: the full buckets, by id.
        rounds: the rounds of gradient sets that some ranks have finished: by process set, label and number.
        retired: the gradient sets that some ranks have dropped: by process set and label.
        last_rounds: by process set and label: the last round that all ranks have finished.
    """

    def __init__(self, scope: Ranks, size: int) -> None:
        self.scope = scope
        self.process_sets = ProcessSetTable(size)
        self.joins = Joins()
        self.layouts = LayoutTable()
        self.requests: Gathering[Key, Request] = Gathering(self.waited_for, scope, self.joins.ranks)
        self.buckets: Gathering[int, BucketReady] = Gathering(
            lambda ready, ranks: self.among_bucket(self.layouts.bucket(ready.bucket_id), ranks), scope)
        self.rounds: Gathering[tuple[int, str, int], RoundDone] = Gathering(self.waited_for, scope, self.joins.ranks)
        self.retired: Gathering[tuple[int, str], Retired] = Gathering(self._members, scope)
        self.last_rounds: dict[tuple[int, str], int] = {}

    def finish_round(self, ranks: Ranks, done: RoundDone) -> bool:
        """Record that some ranks have finished a round; return whether it ends by that. A repetition changes nothing.

        A round ends when every rank of the process set has finished it or has joined. Other ranks do not count.
        """
        name = done.process_set_id, done.label
        if (done.process_set_id not in self.process_sets or done.round_id <= self.last_rounds.get(name, 0)
                or done.round_id < self.layouts.first_round):
            return False
        gathered = self.rounds.add(self.process_sets.among(done.process_set_id, ranks), (*name, done.round_id), done)
        if gathered.missing:
            return False
        self._end_round(done)
        return True

    def ranks_done_with(self, process_set_id: int, label: str, round_id: int) -> frozenset[int]:
        """Return the ranks that have finished a round.

        The ranks of a host with a leader count when all of them have finished it, or when rank 0 asks one for its status.
        """
        if round_id <= self.last_rounds.get((process_set_id, label), 0):
            return frozenset(self.process_sets.among(process_set_id, self.scope))
        gathered = self.rounds.get((process_set_id, label, round_id))
        return frozenset(gathered.ranks if gathered else ())

    def missing_for(self, rank: int, wait: Wait) -> frozenset[int] | None:
        """Return the ranks for which a rank's wait waits; None when it has been answered."""
        if wait.process_set_id not in self.process_sets:
            return None
        if wait.round_id:
            done = self.ranks_done_with(wait.process_set_id, wait.name, wait.round_id)
            members = frozenset(self.process_sets[wait.process_set_id])
            return members.difference(done, self.joins.ranks) if rank in done else None
        tensor = self.requests.get((wait.process_set_id, wait.name, wait.round_id))
        if tensor is None or rank not in tensor.ranks:
            return None
        return frozenset(self.requests.missing_ranks(tensor))

    def retire(self, ranks: Ranks, retired: Retired) -> bool:
        """Record that some ranks have dropped a gradient set; when all have, forget its rounds and return True."""
        name = retired.process_set_id, retired.label
        if retired.process_set_id not in self.process_sets or self.retired.add(ranks, name, retired).missing:
            return False
        self.last_rounds.pop(name, None)
        self.rounds.take_if(lambda done: (done.process_set_id, done.label) == name)
        return True

    def join(self, rank: int) -> tuple[list[Gathered[Request]], list[RoundDone]]:
        """Stop waiting for a rank, which has joined; return the tensors and the rounds that are complete by that."""
        complete, ended = self.requests.join(rank), [gathered.first for gathered in self.rounds.join(rank)]
        self.joins.ranks[rank] = None
        for done in ended:
            self._end_round(done)
        return complete, ended

    def end_join(self, *, succeeded: bool) -> None:
        """Wait for all ranks again: all have joined, or the join has failed. After a success, rounds are numbered anew."""
        if succeeded:
            self.joins.complete()
            self.layouts.resume()
            self.rounds.clear()
        self.joins.ranks.clear()
        self.requests.recount()
        self.rounds.recount()

    def among_bucket(self, bucket: Bucket, ranks: Ranks) -> Ranks:
        """Return those of `ranks` that have a bucket; also when its process set has been removed, which evicted it.

        Ranks that have joined are among them: before anything waits for them, the layout is suspended.
        """
        process_set_id = bucket.response.process_set_id
        if process_set_id == GLOBAL_PROCESS_SET_ID:
            return ranks  # the common case
        if process_set_id in self.process_sets:
            return self.process_sets.among(process_set_id, ranks)
        return tuple(rank for rank in ranks if rank in bucket.response.contributors)

    def withdraw(self, layout: Layout) -> list[Gathered[BucketReady]]:
        """Gather the buckets of a layout no more; return what there is of them."""
        return [self.buckets.pop(bucket.bucket_id) for bucket in layout.buckets if bucket.bucket_id in self.buckets]

    def observe(self, decision: Decision) -> list[Gathered[BucketReady]]:
        """Follow a decision, as a host does before its ranks; return the buckets that are gathered no more."""
        withdrawn: list[Gathered[BucketReady]] = []
        for layout in decision.learned:
            self.layouts.learn(layout)
        for layout_id in decision.suspended:
            withdrawn += self.withdraw(self.layouts.suspend(layout_id))
        for layout_id in decision.evicted:
            withdrawn += self.withdraw(self.layouts.evict(layout_id, decision.sequence))
        for response in decision.responses:
            if response.collective is Collective.JOIN:
                self.end_join(succeeded=response.error is ErrorKind.NONE)
            elif response.error is ErrorKind.NONE and response.collective is Collective.ADD_PROCESS_SET:
                self.process_sets.add(response.members)
            elif response.error is ErrorKind.NONE and response.collective is Collective.REMOVE_PROCESS_SET:
                self.remove_set(response.rows[0])
        return withdrawn

    def remove_set(self, process_set_id: int) -> None:
        """Forget a process set and what is open in it; its requests are taken already, where they count."""
        gatherings: tuple[Gathering[Any, Any], ...] = (self.requests, self.rounds, self.retired)
        for gathering in gatherings:
            gathering.take_if(lambda item: bool(item.process_set_id == process_set_id))
        self.last_rounds = {name: last for name, last in self.last_rounds.items() if name[0] != process_set_id}
        self.process_sets.remove(process_set_id)

    def _end_round(self, done: RoundDone) -> None:
        """Note that a round is over, and those before it: who has finished one has done with them."""
        name = done.process_set_id, done.label
        self.last_rounds[name] = done.round_id
        self.rounds.take_if(lambda each: (each.process_set_id, each.label) == name and each.round_id <= done.round_id)

    def check_invariants(self) -> None:
        """Fail when something is complete, or does not belong to its key."""
        for table in (self.layouts, self.requests, self.buckets, self.rounds, self.retired):
            table.check_invariants()
        for key, requests in self.requests.items():
            assert all(request.key == key for _, request in requests.parts), key
        for bucket_id, reports in self.buckets.items():
            assert all(self.layouts.usable(bucket_id, ready.round_id) for _, ready in reports.parts), bucket_id
        for process_set_id, label, round_id in self.rounds:
            assert round_id > self.last_rounds.get((process_set_id, label), 0), label
            assert round_id >= self.layouts.first_round, label

    def _members(self, item: Request | RoundDone | Retired, ranks: Ranks) -> Ranks:
        """Return those of `ranks` that belong to the process set of an item."""
        return self.process_sets.among(item.process_set_id, ranks)

    def waited_for(self, item: Request | RoundDone, ranks: Ranks) -> Collection[int]:
        """Return those of `ranks` for which something waits: only a join itself waits for ranks that have joined."""
        ranks = self.process_sets.among(item.process_set_id, ranks)
        if not self.joins.ranks or (isinstance(item, Request) and item.collective is Collective.JOIN):
            return ranks
        return [rank for rank in ranks if rank not in self.joins.ranks]
