"""Buckets in mailboxes: each rank reduces its slice for all, also when its thread is interrupted or does not come."""

from __future__ import annotations

import concurrent.futures
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.buckets import BucketEntry, LearnedBucket
from hvdlite.handoff.exchanged_bucket import BucketCall, BucketExchange, ExchangedBucket
from hvdlite.handoff.handle import BlockedWaiters
from hvdlite.handoff.mailbox import MailboxEnd
from hvdlite.memory import futex
from hvdlite.memory.area import REDUCED, Area, area_bytes
from hvdlite.memory.patience import Patience
from hvdlite.negotiation.messages import Bucket, BucketReady, Mailbox, Request, Response
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.base import BufferSlice, FusionBuffer
from hvdlite.planes.exchange import ReduceInPlace

WAITERS = BlockedWaiters(lambda: None, lambda _: None)
ELEMENTS = 1 << 12


def run_ranks(function: Callable[[int], None], size: int) -> None:
    """Call a function for each rank, in threads."""
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        list(pool.map(function, range(size)))


class World:
    """The ranks' memory and their ends of the mailbox of one bucket."""

    def __init__(self, size: int) -> None:
        ranks = tuple(range(size))
        self.values = [np.zeros(ELEMENTS) for _ in ranks]
        response = Response(names=("a",), collective=Collective.ALLREDUCE, dtype="float64", op=ReduceOp.AVERAGE,
                            contributors=ranks)
        definition = Bucket(bucket_id=7, members=(Request("a", Collective.ALLREDUCE, "float64", (ELEMENTS,), label="set"),),
                            offsets=(0,), elements=ELEMENTS, response=response)
        slots = tuple(each.view(np.uint8) for each in self.values)
        self.buckets = [LearnedBucket(definition, BufferSlice(FusionBuffer(slot, slots), 0, slot.nbytes)) for slot in slots]
        memory, self.posted = bytearray(area_bytes(size)), list[Any]()
        inbox: Any = types.SimpleNamespace(post=self.posted.append, release=lambda key: None)
        mailbox = Mailbox(mailbox_id=1, stem="bucket 7", process_set_id=0, area=0, capacity=0, first_round=1)
        self.ends = [MailboxEnd(mailbox, ranks, Area(memory, rank, size), Casts.of_numpy(), inbox, lambda _: None,
                                Patience(0.0)) for rank in ranks]

    def send(self, rank: int, number: int, unused: tuple[int, ...] = ()) -> ExchangedBucket:
        """Fill a rank's bucket and write it to the mailbox."""
        self.values[rank][:] = number + rank
        ready = BucketReady(bucket_id=7, round_id=number, unused=unused, ends_round=True, blocking=True)
        call = BucketCall(self.buckets[rank], ready, WAITERS)
        assert self.ends[rank].write(call)
        return ExchangedBucket(call, self.ends[rank], WAITERS)

    def check(self, rank: int, number: int) -> None:
        """Fail unless this is a rank's result."""
        assert (self.values[rank] == number + (len(self.values) - 1) / 2).all()


@pytest.mark.skipif(not futex.AVAILABLE, reason="needs futexes")
@pytest.mark.parametrize("size", [2, 3])
def test_whoever_has_waited_has_the_results_of_all_slices(size: int) -> None:
    world = World(size)

    def train(rank: int) -> None:
        for number in range(1, 200):
            handle = world.send(rank, number, unused=(0,) if number == 100 else ())
            handle.wait()
            world.check(rank, number)
            assert handle.contributors == tuple(range(size))
            assert handle.globally_unused == ({0} if number == 100 else frozenset())

    run_ranks(train, size)


@pytest.mark.parametrize("interrupted", [BucketExchange, Reduction])
def test_a_thread_that_is_interrupted_takes_up_its_part_again(interrupted: type, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    mine, others = world.send(0, 1), world.send(1, 1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, "collect" if interrupted is BucketExchange else "combine", interrupt)
    with pytest.raises(KeyboardInterrupt):
        mine.wait()
    monkeypatch.undo()
    run_ranks(lambda rank: (mine, others)[rank].wait(), 2)
    world.check(0, 1)
    world.check(1, 1)


@pytest.mark.skipif(not futex.AVAILABLE, reason="needs futexes")
def test_the_background_thread_does_the_part_of_a_thread_that_does_not_come() -> None:
    world = World(2)
    mine, _ = world.send(0, 1), world.send(1, 1)

    def act(rank: int) -> None:
        if rank == 0:
            mine.wait()
            return
        while not world.posted:  # rank 0 is waiting for rank 1's part, and loses patience
            pass
        assert world.ends[1].freeze() == 1 and world.ends[1].close() is None

    BucketCall.patience_seconds, kept = 0.01, BucketCall.patience_seconds
    try:
        run_ranks(act, 2)
    finally:
        BucketCall.patience_seconds = kept
    world.check(0, 1)
    assert (world.values[1] == world.values[0]).all()


def test_a_rank_that_dies_before_it_has_done_its_part_ends_the_wait_of_the_others() -> None:
    world = World(2)
    mine, _ = world.send(0, 1), world.send(1, 1)

    def act(rank: int) -> None:
        if rank == 0:
            with pytest.raises(HorovodInternalError, match="rank 1 was lost"):
                mine.wait()
        else:
            while not world.ends[0]._area.lines[0][REDUCED]:  # rank 0 has done its part
                pass
            world.ends[0].fail(HorovodInternalError("rank 1 was lost"))

    run_ranks(act, 2)
    assert not world.ends[0].has_call


@pytest.mark.parametrize("ended", ["close", "fail"])
def test_a_mailbox_that_has_ended_lets_go_of_the_bucket(ended: str) -> None:
    world = World(2)
    handles = [world.send(rank, 1) for rank in range(2)]
    run_ranks(lambda rank: handles[rank].wait(), 2)
    memory = weakref.ref(world.ends[0]._exchange._reduce)  # type: ignore[attr-defined]
    handles.clear()
    gc.collect()
    assert memory() is not None, "for the next round"
    for end in world.ends:
        end.freeze()
        _ = end.close() if ended == "close" else end.fail(HorovodInternalError("over"))  # type: ignore[func-returns-value]
    gc.collect()
    assert memory() is None


def test_texts_are_short_however_many_members_are_unused() -> None:
    world = World(2)
    world.send(0, 1, unused=tuple(range(5000)))
    world.send(1, 1, unused=tuple(range(5000)))
    assert all(end.is_complete(end._call) for end in world.ends)  # type: ignore[arg-type]


def test_a_bucket_that_others_have_not_written_is_reported_after_all() -> None:
    world = World(2)
    handle = world.send(0, 1)
    world.ends[0].freeze()
    entry = world.ends[0].close()
    assert isinstance(entry, BucketEntry) and entry.ready.round_id == 1
    assert (world.values[0] == 1).all(), "nothing is reduced"
    entry.handle.partly_unused = (0,)
    entry.handle.settle(None)
    handle.wait()
    assert handle.partly_unused == (0,)


@pytest.mark.parametrize("unused", [(), (0,)])
def test_ranks_that_lack_different_members_do_not_meet(unused: tuple[int, ...]) -> None:
    world = World(2)
    world.send(0, 1, unused=(0,))
    world.send(1, 1, unused=unused)
    assert all(end.is_complete(end._call) is (unused == (0,)) for end in world.ends)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", ["copyto", "combine"])
@pytest.mark.parametrize("prescale", [1.0, 0.5])
def test_a_reduction_in_place_goes_on_where_it_was_interrupted(function: str, prescale: float,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    response = Response(names=("a",), collective=Collective.ALLREDUCE, dtype="float32", op=ReduceOp.SUM, prescale=prescale,
                        contributors=(0, 1))
    for fatal in range(12):
        slots = [np.arange(100, dtype=np.float32) + rank for rank in range(2)]
        reduction = Reduction(response, np.dtype(np.float32), 2, 16, Casts.of_numpy())
        mine = ReduceInPlace(reduction, slots, 0)
        owner, calls = (np, [0]) if function == "copyto" else (Reduction, [0])
        real = getattr(owner, function)

        def interrupt(*args: Any, calls: list[int] = calls, real: Any = real, fatal: int = fatal) -> None:
            calls[0] += 1
            if calls[0] == fatal + 1:
                if fatal % 2:
                    real(*args)  # at its end
                raise KeyboardInterrupt
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, function, interrupt)
            for _ in range(2):
                try:
                    mine.run()
                except KeyboardInterrupt:
                    continue
        ReduceInPlace(reduction, slots, 1).run()
        assert all((slot == (2 * np.arange(100) + 1) * prescale).all() for slot in slots), fatal
