"""Locked rounds with real threads, over doubles of GPUs (docs/protocol.md#locked-rounds)."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError, PeerLeftError
from hvdlite.core.types import ReduceOp
from hvdlite.engine.mailboxes import Areas
from hvdlite.memory.futex import AVAILABLE
from hvdlite.memory.mailbox_area import MailboxArea, area_bytes
from hvdlite.negotiation.messages import BucketReady
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.cuda import view
from tests.gpu_double.worlds import Gpus, allreduce
from tests.gpu_double.worlds import gpus as gpus

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="there are no futexes")
LABEL, MEMBERS = "set", 3


class SharedAreas:
    """The memory of locks in a world of threads."""

    def __init__(self) -> None:
        self._memory: list[bytearray] = []
        self._guard = threading.Lock()

    def of(self, rank: int) -> Areas:
        numbers = itertools.count()

        def area(capacity: int, ranks: Sequence[int]) -> MailboxArea | None:
            number = next(numbers)
            with self._guard:
                while len(self._memory) <= number:
                    self._memory.append(bytearray(area_bytes(capacity, len(ranks))))
            return MailboxArea(self._memory[number], list(ranks).index(rank), len(ranks), capacity)
        return area


@pytest.fixture
def locked(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Let the worlds of a test have locks."""
    real, areas = worlds.assemble_threads, SharedAreas()
    monkeypatch.setattr(worlds, "assemble_threads", lambda *arguments, **options: real(
        *arguments, **{"areas": areas.of, **options}))
    return gpus


def run(size: int, step: Callable[[Runtime], None]) -> None:
    worlds.threads(size, step, locked_rounds=True, bucket_size=256, bucket_edge=256)


class Trainer:
    """Reduces a gradient set on a rank, round by round.

    Attributes:
        was_locked: whether this rank had a lock in some round.
    """

    def __init__(self, gpus: Gpus, runtime: Runtime) -> None:
        self.runtime, self.round = runtime, 0
        self.was_locked = False
        self._values = [np.zeros(64, np.float32) for _ in range(MEMBERS)]
        self._members = [gpus.wrap(runtime, values) for values in self._values]

    def fill(self, buckets: int = MEMBERS) -> list[Any]:
        """Begin a round; return the handles of so many buckets and their values."""
        runtime, rank = self.runtime, self.runtime.world.rank
        self.round += 1
        learned = runtime.layout(LABEL, self.round)
        self.was_locked = self.was_locked or bool(runtime._state.locks)
        begun = []
        if learned is None:
            for index, (member, values) in enumerate(zip(self._members, self._values, strict=True)):
                values[:] = self.round + index + rank
                begun.append((runtime.enqueue_gradient(f"x.{index}", member, member, ReduceOp.SUM,
                                                       Moment(LABEL, self.round)), values))
            runtime.close_round(LABEL, self.round)
            return begun
        for index, bucket in enumerate(learned.buckets[:buckets]):
            name = bucket.definition.members[0].name
            values = view(bucket.memory.pointer, 64, np.dtype(np.float32))
            values[:] = self.round + int(name[-1]) + rank
            ready = BucketReady(bucket_id=bucket.definition.bucket_id, round_id=self.round, step=self.round,
                                ends_round=index == MEMBERS - 1)
            begun.append((runtime.enqueue_bucket(bucket, ready), values))
        return begun

    def step(self) -> None:
        """Make a round, and check it."""
        size, found = self.runtime.world.size, set()
        for handle, values in self.fill():
            handle.wait()
            handle.completion.wait()
            assert (values == values[0]).all()
            found.add(float(values[0]))
        assert found == {size * (self.round + index) + size * (size - 1) / 2 for index in range(MEMBERS)}

    def until_locked(self) -> None:
        """Make rounds until there is a lock, and the next round is announced in it."""
        for _ in range(12):
            self.step()
        assert self.was_locked


@pytest.mark.parametrize("size", [2, 3])
def test_rounds_with_and_without_a_lock_in_turn(locked: Gpus, size: int) -> None:
    def step(runtime: Runtime) -> None:
        trainer = Trainer(locked, runtime)
        for _ in range(2):
            trainer.until_locked()
            values = np.full(5, runtime.world.rank + 1.0)
            handle = allreduce(locked, runtime, "metric", values)  # the lock ends before that is launched
            handle.wait()
            handle.completion.wait()
            assert (values == size * (size + 1) / 2).all()
            trainer.was_locked = False
            for _ in range(30):
                trainer.step()
    run(size, step)


def test_a_rank_that_waits_in_a_lock_for_one_that_does_not_come(locked: Gpus) -> None:
    """The wait ends the lock. The other rank leaves: the wait fails, like that of a bucket that is reported."""
    waits = threading.Event()

    def step(runtime: Runtime) -> None:
        trainer = Trainer(locked, runtime)
        trainer.until_locked()
        if runtime.world.rank == 1:
            assert waits.wait(worlds.HANGS_SECONDS)
            runtime.shutdown()
            return
        begun = trainer.fill()
        waits.set()
        for handle, _ in begun:
            handle.wait()  # its members are answered one by one
            with pytest.raises(PeerLeftError):
                handle.parts[0].wait()
    run(2, step)


def test_what_is_announced_is_launched_for_the_others_after_a_rank_has_left(locked: Gpus) -> None:
    announced = threading.Event()

    def step(runtime: Runtime) -> None:
        trainer = Trainer(locked, runtime)
        trainer.until_locked()
        if runtime.world.rank == 1:
            trainer.fill(2)
            announced.set()
            runtime.shutdown()
            return
        assert announced.wait(worlds.HANGS_SECONDS)
        with contextlib.suppress(PeerLeftError):  # the lock had ended before this rank announced the bucket
            for handle, _ in trainer.fill(2):
                handle.wait()
                for each in getattr(handle, "parts", ()) or (handle,):
                    each.wait()
                    each.completion.wait()
    run(2, step)


def test_a_world_that_is_lost_fails_what_waits_in_a_lock(locked: Gpus) -> None:
    waits = threading.Event()

    def step(runtime: Runtime) -> None:
        trainer = Trainer(locked, runtime)
        trainer.until_locked()
        if runtime.world.rank == 1:
            assert waits.wait(worlds.HANGS_SECONDS)
            runtime.stop("a rank was lost")
            return
        begun = trainer.fill()
        waits.set()
        for handle, _ in begun:
            with pytest.raises(HorovodInternalError, match="a rank was lost"):
                handle.wait()
    run(2, step)


def test_an_error_of_a_launch_ends_the_job(locked: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        trainer = Trainer(locked, runtime)
        trainer.until_locked()
        (communicator,) = locked.made[runtime.world.rank].nccl.communicators

        def fail(*_: Any) -> None:
            raise KeyError(3)
        communicator.allReduce = fail  # type: ignore[method-assign]
        with pytest.raises(HorovodInternalError, match="NCCL failed in allreduce of 'x"):
            for handle, _ in trainer.fill():
                handle.wait()
    run(2, step)
