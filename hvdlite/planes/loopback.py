"""Ranks as threads of one process: the readable reference that every plane must match. Also serves size 1."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import Collective
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.base import FusionBuffer, Plan, WaitUntil

ALIGNMENT = 64


class Table:
    """What the threads share: for each plan, what every rank laid on it and who is done with it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.laid: dict[int, dict[int, Plan]] = {}
        self.done: dict[int, set[int]] = {}


class LoopbackPlane:
    """Like `ShmPlane`, in the plainest way.

    Args:
        ring: wakes another rank that may be waiting.
    """

    name = "loopback"

    def __init__(self, rank: int, table: Table, ring: Callable[[int], None], casts: Casts | None = None) -> None:
        self._rank, self._table, self._ring = rank, table, ring
        self._casts = casts or Casts.of_numpy()

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        table, number = self._table, plan.sequence
        with table.lock:
            plans = table.laid.setdefault(number, {})
            done = table.done.setdefault(number, set())
            plans[self._rank] = plan
        self._ring_others()
        wait_until(lambda: len(plans) == table.size)
        results = _RESULTS[plan.response.collective](plan, plans, table.size, self._casts)
        with table.lock:
            done.add(self._rank)
        self._ring_others()
        wait_until(lambda: len(done) == table.size)  # nobody reads the sources any more
        for output, result in zip(plan.outputs, results, strict=True):
            if output is not None and result is not None:
                np.copyto(output, result)
        with table.lock:
            table.laid.pop(number, None)
            table.done.pop(number, None)

    def fusion_buffer(self, nbytes: int) -> FusionBuffer:
        room = np.zeros(nbytes + ALIGNMENT, np.uint8)
        begin = -room.ctypes.data % ALIGNMENT
        return FusionBuffer(room[begin:begin + nbytes])

    def close(self) -> None:
        pass

    def _ring_others(self) -> None:
        for rank in range(self._table.size):
            if rank != self._rank:
                self._ring(rank)


def _allreduced(plan: Plan, plans: dict[int, Plan], size: int, casts: Casts) -> list[Array | None]:
    response = plan.response
    results: list[Array | None] = []
    for index, output in enumerate(plan.outputs):
        assert output is not None
        sources = [plans[rank].sources[index] for rank in response.contributors]
        reduction = Reduction(response, SUPPORTED_DTYPES[response.dtype], size, output.size, casts)
        placed = [reduction.placed(source) for source in sources if source is not None]
        result = np.empty_like(output)
        if placed:
            reduction.combine(placed, result)
        results.append(result if placed else None)
    return results


def _broadcast(plan: Plan, plans: dict[int, Plan], size: int, casts: Casts) -> list[Array | None]:
    return [np.copy(source) for source in plans[plan.response.root_rank].sources if source is not None]


def _gathered(plan: Plan, plans: dict[int, Plan], size: int, casts: Casts) -> list[Array | None]:
    parts = [source for rank in range(size) if (source := plans[rank].sources[0]) is not None]
    return [np.concatenate(parts)]


def _nothing(plan: Plan, plans: dict[int, Plan], size: int, casts: Casts) -> list[Array | None]:
    return [None for _ in plan.outputs]


_RESULTS: dict[Collective, Callable[[Plan, dict[int, Plan], int, Casts], list[Array | None]]] = {
    Collective.ALLREDUCE: _allreduced, Collective.BROADCAST: _broadcast,
    Collective.ALLGATHER: _gathered, Collective.BARRIER: _nothing,
}

