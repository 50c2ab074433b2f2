"""Ranks as threads of one process: the reference implementation that every plane must match. Also used for size 1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hvdlite.core.array import Array, aligned_zeros
from hvdlite.core.types import Collective
from hvdlite.planes.arithmetic import Casts
from hvdlite.planes.base import FusionBuffer, Plan, WaitUntil
from hvdlite.planes.eager import reduced


class LoopbackHub:
    """The shared state of the rank threads: by plan of a process set, every rank's plan and the ranks that have finished."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.plans: dict[tuple[int, int], dict[int, Plan]] = {}
        self.done: dict[tuple[int, int], set[int]] = {}


class LoopbackPlane:
    """Implements `Plane` in the simplest way.

    Args:
        wake_rank: wakes another rank that may be waiting.
    """

    name = "loopback"

    def __init__(self, rank: int, hub: LoopbackHub, wake_rank: Callable[[int], None], casts: Casts | None = None) -> None:
        self._rank, self._hub, self._wake_rank = rank, hub, wake_rank
        self._casts = casts or Casts.of_numpy()

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        hub, key = self._hub, (plan.response.process_set_id, plan.sequence)
        with hub.lock:
            plans = hub.plans.setdefault(key, {})
            done = hub.done.setdefault(key, set())
            plans[self._rank] = plan
        self._ring_others(plan.ranks)
        wait_until(lambda: len(plans) == len(plan.ranks))
        results = _RESULTS[plan.response.collective](plan, plans, self._rank, self._casts) if plan.sources else ()
        with hub.lock:
            done.add(self._rank)
        self._ring_others(plan.ranks)
        wait_until(lambda: len(done) == len(plan.ranks))  # no rank reads the sources any more
        for output, result in zip(plan.outputs, results, strict=True):
            if output is not None and result is not None:
                np.copyto(output, result)
        with hub.lock:
            hub.plans.pop(key, None)
            hub.done.pop(key, None)

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        pass

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        pass

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        return FusionBuffer(aligned_zeros(nbytes)) if self._rank in ranks else None

    def staging_bytes(self) -> int:
        return 0

    def tune(self, settings: Mapping[str, int]) -> None:
        pass

    def close(self) -> None:
        pass

    def _ring_others(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank != self._rank:
                self._wake_rank(rank)


Results = Sequence[Array | None]


def _reduced(plan: Plan, plans: dict[int, Plan], rank: int, casts: Casts) -> Results:
    """Return each tensor's reduction over the contributors; None without contributors."""
    response = plan.response
    results: list[Array | None] = []
    for index in range(len(plan.sources)):
        sources = [source for each in response.contributors if (source := plans[each].sources[index]) is not None]
        if not sources:
            results.append(None)
            continue
        results.append(reduced(response, sources, len(plan.ranks), casts))
    return results


def _own_rows(plan: Plan, whole: Array | None, rank: int) -> Results:
    """Return this rank's rows of a tensor that is split by `response.rows`."""
    assert whole is not None
    rows, per_row = plan.response.rows, plan.response.row_elements
    index = plan.ranks.index(rank)
    begin = sum(rows[:index]) * per_row
    return [whole[begin:begin + rows[index] * per_row]]


def _reduced_and_scattered(plan: Plan, plans: dict[int, Plan], rank: int, casts: Casts) -> Results:
    return _own_rows(plan, _reduced(plan, plans, rank, casts)[0], rank)


def _scattered(plan: Plan, plans: dict[int, Plan], rank: int, casts: Casts) -> Results:
    return [None if part is None else part.copy()
            for part in _own_rows(plan, plans[plan.response.root_rank].sources[0], rank)]


def _broadcast(plan: Plan, plans: dict[int, Plan], rank: int, casts: Casts) -> Results:
    """Copy the root's tensors. A send is a broadcast to one rank; the sender has no output."""
    return [None if source is None else source.copy() for source in plans[plan.response.root_rank].sources]


def _gathered(plan: Plan, plans: dict[int, Plan], rank: int, casts: Casts) -> Results:
    return [np.concatenate([source for each in plan.response.contributors
                            if (source := plans[each].sources[0]) is not None])]


def _alltoall(plan: Plan, plans: dict[int, Plan], rank: int, casts: Casts) -> Results:
    splits, per_row = plan.splits, plan.response.row_elements
    assert splits is not None
    parts = []
    for each, rows, start in zip(plan.ranks, splits.recv_rows, splits.source_starts, strict=True):
        if each not in plan.response.contributors:
            continue
        source = plans[each].sources[0]
        assert source is not None
        parts.append(source[start * per_row:(start + rows) * per_row])
    return [np.concatenate(parts)]


_RESULTS: dict[Collective, Callable[[Plan, dict[int, Plan], int, Casts], Results]] = {
    Collective.ALLREDUCE: _reduced, Collective.REDUCE: _reduced, Collective.REDUCESCATTER: _reduced_and_scattered,
    Collective.BROADCAST: _broadcast, Collective.SCATTER: _scattered, Collective.ALLGATHER: _gathered,
    Collective.GATHER: _gathered, Collective.ALLTOALL: _alltoall, Collective.SEND: _broadcast,
}
