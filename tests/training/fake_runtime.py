"""A runtime for one reducer of arrays, where the other rank of two does what a test says."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.core.errors import HvdliteError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.buckets import LearnedBucket, LearnedLayout
from hvdlite.handoff.handle import WaitDeferred
from hvdlite.negotiation.messages import Bucket, BucketReady, Layout, Request, Response
from hvdlite.planes.base import FusionBuffer
from hvdlite.training.gradients.arrays import ArrayGradients, Slot

LABEL = "set"


class Written(ArrayGradients):
    """Arrays of which is known how often they were written to: their version is their values."""

    def version(self, gradient: Any) -> int:
        return hash(gradient.tobytes())


class FakeHandle:
    """Of one gradient, or of a bucket."""

    completion = None
    parts = ()

    def __init__(self, runtime: FakeRuntime, reduce: Callable[[FakeHandle], Any]) -> None:
        self._runtime = runtime
        self._reduce = reduce
        self._result: Any = None
        self._is_done = False
        self.contributors: tuple[int, ...] = ()
        self.globally_unused: frozenset[int] = frozenset()
        self.partly_unused: tuple[int, ...] = ()
        self.ranks_in_step: tuple[int, ...] = ()

    def wait(self, *, deferrable: bool = False) -> Any:
        """Return the result."""
        if deferrable and self._runtime.defers:
            raise WaitDeferred
        if self._runtime.error is not None:
            raise self._runtime.error
        if not self._is_done:
            self._result, self._is_done = self._reduce(self), True
            self.ranks_in_step = self._runtime.ranks_in_step
        return self._result


class FakeRuntime:
    """Rank 0 of two.

    Attributes:
        other: what the other rank has, given a member's number and this rank's gradient, or None; None: it has none.
        other_rows: what the other rank has counted.
        closed: the rounds that this rank has closed, by themselves or with a bucket.
    """

    def __init__(self) -> None:
        self.gradients = self  # it stands for `GradientSets`, too
        self.world = types.SimpleNamespace(rank=0, size=2)
        self.joins = 0
        self.progress = types.SimpleNamespace(round=lambda: None)
        self.other: Callable[[int, Any], Any] = lambda number, own: own
        self.other_rows = np.empty((0, 3))
        self.defers = False
        self.ranks_in_step: tuple[int, ...] = ()
        self.error: HvdliteError | None = None
        self.closed: list[int] = []
        self.learned: LearnedLayout | None = None
        self.stale = False

    def members(self, process_set: int) -> tuple[int, ...]:
        return (0, 1)

    def retire(self, label: str, process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
        pass

    def layout(self, label: str, number: int) -> LearnedLayout | None:
        return None if self.stale else self.learned

    def is_suspended(self, label: str) -> bool:
        return False

    def mark_stale(self, layout: Layout) -> None:
        self.stale = True

    def close_round(self, label: str, number: int, process_set: int) -> None:
        self.closed.append(number)

    def learn(self, slots: list[Slot], names: list[str], op: ReduceOp) -> None:
        """Let rounds go by two buckets from now on."""
        half, buckets = len(slots) // 2, []
        for part in (slice(0, half), slice(half, None)):
            requests = tuple(Request(name, Collective.ALLREDUCE, "float32", slot.shape, label=LABEL)
                             for name, slot in zip(names[part], slots[part], strict=True))
            sizes = [slot.shape[0] for slot in slots[part]]
            offsets = tuple(sum(sizes[:index]) for index in range(len(sizes)))
            response = Response(names=tuple(names[part]), collective=Collective.ALLREDUCE, dtype="float32", op=op)
            buckets.append(Bucket(bucket_id=len(buckets), members=requests, offsets=offsets, elements=sum(sizes),
                                  response=response))
        layout = Layout(layout_id=1, label=LABEL, first_round=1, buckets=tuple(buckets))
        self.learned = LearnedLayout(layout, {"cpu": FusionBuffer(np.zeros(1 << 17, np.uint8))})
        self.stale = False

    def enqueue_gradient(self, name: str, source: Any, output: Any, op: ReduceOp, moment: Any, **how: Any) -> FakeHandle:
        def reduce(handle: FakeHandle) -> Any:
            handle.contributors = self._reduce(name, source, output, op)
            if handle.contributors:
                np.multiply(output, how["postscale"], output)
            return output
        return FakeHandle(self, reduce)

    def enqueue_rows(self, name: str, rows: Any, moment: Any, *, process_set: int) -> FakeHandle:
        return FakeHandle(self, lambda handle: np.concatenate([rows, self.other_rows]))

    def enqueue_bucket(self, bucket: LearnedBucket, ready: BucketReady, event: Any = None) -> FakeHandle:
        if ready.ends_round:
            self.closed.append(ready.round_id)

        def reduce(handle: FakeHandle) -> None:
            given = [self._reduce(member.name, None if place in ready.unused else bucket.places[place], bucket.places[place],
                                  bucket.definition.response.op) for place, member in enumerate(bucket.definition.members)]
            handle.globally_unused = frozenset(place for place, ranks in enumerate(given) if not ranks)
            handle.partly_unused = tuple(place for place, ranks in enumerate(given) if len(ranks) == 1)
        return FakeHandle(self, reduce)

    def _reduce(self, name: str, own: Any, output: Any, op: ReduceOp) -> tuple[int, ...]:
        """Return who has contributed."""
        number = int(name.rpartition(".")[2])
        other = self.other(number, None if own is None else own.copy())
        there = [(rank, values) for rank, values in ((0, own), (1, other)) if values is not None]
        if there:
            total = np.sum([values for _, values in there], axis=0)
            output[...] = total / 2 if op is ReduceOp.AVERAGE else total
        return tuple(rank for rank, _ in there)
