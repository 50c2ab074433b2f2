"""Memory of buckets as symmetric windows, over a double: when ranks have them, when they go without, and how they end."""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvdlite.core.device import DeviceArray
from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import AlltoallSplits, Plan
from hvdlite.planes.nccl.api import NcclError
from hvdlite.planes.nccl.communicator import NcclOptions
from hvdlite.planes.nccl.plane import NcclPlane
from tests.device_double import GpuDouble, plane, view
from tests.gpu_worlds import spin
from tests.planes.communicator_double import Meetings, NcclErrorDouble
from tests.planes.cuda_double import CudaDouble
from tests.planes.makers import Board, BoardOob
from tests.worlds import HANGS_SECONDS

BYTES = 1 << 13


class Ranks:
    """Planes of several ranks, each with a double of a GPU.

    Args:
        own: the options of each rank.
        options: those of all ranks.
    """

    def __init__(self, size: int, meetings: Meetings | None = None, own: Sequence[dict[str, Any]] = (),
                 **options: Any) -> None:
        board, meetings = Board(lambda: None), meetings or Meetings()
        options = {"options": NcclOptions(windows=True), **options}
        self.gpus = [GpuDouble(0, meetings) for _ in range(size)]
        self.everybody = tuple(range(size))
        self.planes = [plane(rank, BoardOob(board, rank), lambda: None, gpu, **options, **(own[rank] if own else {}))
                       for rank, gpu in enumerate(self.gpus)]
        for each in self.planes:
            each.add_process_set(0, self.everybody)

    def run(self, step: Callable[[NcclPlane, int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.planes)) as pool:
            return list(pool.map(step, self.planes, self.everybody))

    def end(self) -> None:
        self.run(lambda each, rank: each.close())
        for gpu in self.gpus:
            gpu.end()
            assert gpu.error is None, gpu.error


def memory(ranks: Ranks, each: NcclPlane) -> DeviceArray:
    buffer = each.fusion_buffer(BYTES, ranks.everybody, spin)
    assert buffer is not None and isinstance(buffer.own, DeviceArray)
    return buffer.own


def reduce(ranks: Ranks, each: NcclPlane, array: DeviceArray, sequence: int = 1, process_set_id: int = 0) -> None:
    """Reduce the whole of an array of float32 in place."""
    response = Response(names=("bucket",), collective=Collective.ALLREDUCE, dtype="float32", op=ReduceOp.SUM, device="cuda",
                        process_set_id=process_set_id, contributors=ranks.everybody, elements=array.size)
    each.execute(Plan(sequence, ranks.everybody, response, [array], [array]), spin).wait()


def windows(ranks: Ranks) -> list[int]:
    return [gpu.held()["windows"] for gpu in ranks.gpus]


@pytest.mark.parametrize("size", [2, 3])
def test_a_buckets_memory_is_a_window_and_zero(size: int) -> None:
    ranks = Ranks(size)

    def step(each: NcclPlane, rank: int) -> None:
        own = memory(ranks, each)  # the first thing of all: so it is with a layout of the world before
        values = view(own.pointer, BYTES // 4, np.dtype(np.float32))
        assert not values.any() and windows(ranks)[rank] == 1
        values += rank + 1
        reduce(ranks, each, own.part(0, BYTES // 4, np.dtype(np.float32)))
        assert (values == sum(range(1, size + 1))).all()
    ranks.run(step)
    ranks.end()


@pytest.mark.parametrize(("spoil", "registered"), [
    (lambda gpu: setattr(gpu, "no_windows", "NCCL 2.26.2 has no ncclCommWindowRegister; 2.27.3 has it"), [0, 0, 0]),
    (lambda gpu: setattr(gpu, "window_fault", NcclErrorDouble("unhandled cuda error")), [0, 0, 0]),
    (lambda gpu: setattr(gpu, "makes_windows", False), [1, 0, 1])], ids=["old", "no memory", "no window"])
def test_if_one_rank_has_no_window_none_uses_one(spoil: Callable[[GpuDouble], None], registered: list[int],
                                                 caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hvdlite")
    ranks = Ranks(3)
    spoil(ranks.gpus[1])

    def step(each: NcclPlane, rank: int) -> None:
        own = memory(ranks, each)
        values = view(own.pointer, BYTES // 4, np.dtype(np.float32))
        assert not values.any()
        values += 1
        reduce(ranks, each, own.part(0, BYTES // 4, np.dtype(np.float32)))
        assert (values == 3).all() and own.pointer not in ranks.gpus[rank].window_memory
        spoiled = ranks.gpus[1]
        spoiled.no_windows, spoiled.window_fault, spoiled.makes_windows = "", None, True
        memory(ranks, each)
    ranks.run(step)
    assert windows(ranks) == registered, "a process set that was refused is not tried again"
    assert sum("are not registered with NCCL: rank 1: " in message for message in caplog.messages) == 3
    ranks.end()
    assert not any(gpu.window_memory for gpu in ranks.gpus)


@pytest.mark.parametrize("collective", [
    Collective.ALLREDUCE, Collective.BROADCAST, Collective.ALLGATHER, Collective.REDUCESCATTER, Collective.ALLTOALL])
def test_a_slice_of_a_bucket_is_copied_for_other_collectives(collective: Collective) -> None:
    """On another rank the tensor may be elsewhere: with symmetric windows, ranks must call NCCL with the same offsets."""
    ranks = Ranks(2)

    def step(each: NcclPlane, rank: int) -> None:
        own = memory(ranks, each)
        given, taken = np.full(4, rank + 1.0, np.float32), np.zeros(8, np.float32)
        if rank == 1:
            source, target = (own.part(begin, count, given.dtype) for begin, count in ((16, 4), (128, 8)))
            view(source.pointer, 4, given.dtype)[...] = given
        else:
            source, target = (DeviceArray(each.ctypes.data, each.shape, each.dtype, 0, each) for each in (given, taken))
        expected = {Collective.ALLREDUCE: [3, 3, 3, 3], Collective.BROADCAST: [2, 2, 2, 2], Collective.REDUCESCATTER: [3, 3],
                    Collective.ALLGATHER: [1, 1, 1, 1, 2, 2, 2, 2], Collective.ALLTOALL: [1, 1, 2, 2]}[collective]
        target = target.part(0, len(expected))
        response = Response(names=("x",), collective=collective, dtype="float32", op=ReduceOp.SUM, root_rank=1,
                            device="cuda", contributors=(0, 1), row_elements=1, elements=4,
                            rows=(2, 2) if collective is Collective.REDUCESCATTER else (4, 4))
        splits = AlltoallSplits((2, 2), (2, 2), (0, 2 * rank)) if collective is Collective.ALLTOALL else None
        each.execute(Plan(1, (0, 1), response, [source], [target], splits=splits), spin).wait()
        assert view(target.pointer, len(expected), given.dtype).tolist() == expected
        assert (view(source.pointer, 4, given.dtype) == rank + 1).all()
    ranks.run(step)
    ranks.end()


def test_what_the_framework_keeps_unused_is_taken_back_for_a_window() -> None:
    ranks = Ranks(2)
    for gpu in ranks.gpus:
        gpu.memory = BYTES - 1

    def step(each: NcclPlane, rank: int) -> None:
        gpu, own = ranks.gpus[rank], np.ones(4, np.float32)
        gpu.cached = BYTES
        each.wrap(own.ctypes.data, (4,), own.dtype, 0, stream=0, owner=own, reclaim=gpu.reclaim)
        memory(ranks, each)
        assert gpu.reclaimed == 1 and gpu.held()["windows"] == 1
    ranks.run(step)
    ranks.end()


def test_no_windows_without_other_ranks_or_where_they_are_turned_off() -> None:
    for ranks in (Ranks(1), Ranks(2, options=NcclOptions())):
        ranks.run(lambda each, rank, of=ranks: memory(of, each))
        assert not any(windows(ranks)) and not any(gpu.window_memory for gpu in ranks.gpus)
        ranks.end()


def test_windows_last_as_long_as_their_communicator() -> None:
    """NCCL places the next window by what this rank has registered. The double checks that calls have equal offsets."""
    ranks = Ranks(2)

    def step(each: NcclPlane, rank: int) -> None:
        gpu, kept = ranks.gpus[rank], [memory(ranks, each), memory(ranks, each)]
        del kept[rank]  # each rank drops another one
        gc.collect()
        kept.append(memory(ranks, each))
        reduce(ranks, each, kept[-1].part(0, 4, np.dtype(np.float32)))
        assert gpu.held()["windows"] == 3 == len(gpu.window_memory)
    ranks.run(step)
    gc.collect()
    ranks.end()
    assert not any(gpu.window_memory for gpu in ranks.gpus)


def test_no_more_windows_when_too_much_of_their_memory_is_unused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hvdlite")
    ranks = Ranks(2)

    def step(each: NcclPlane, rank: int) -> None:
        kept = []
        for count in (1, 2, 2, 2):
            kept.append(memory(ranks, each))
            if rank == 0:
                kept.clear()
                gc.collect()
            assert ranks.gpus[rank].held()["windows"] == count
    ranks.run(step)
    assert "not registered with NCCL: rank 0: windows that are not used any more take too much memory" in caplog.text
    ranks.end()


@pytest.mark.parametrize("fails", [False, True])
def test_memory_that_nccl_does_not_register_is_freed_before_other_memory_is_allocated(fails: bool) -> None:
    ranks = Ranks(2)

    def step(each: NcclPlane, rank: int) -> None:
        gpu = ranks.gpus[rank]
        gpu.makes_windows, real = False, gpu.allocate

        def register(*_: Any) -> int:
            raise NcclErrorDouble("unhandled cuda error")

        def allocate(nbytes: int) -> DeviceArray:
            assert nbytes < BYTES or not gpu.window_memory
            return real(nbytes)
        gpu.allocate = allocate  # type: ignore[method-assign]
        if fails:
            gpu.register_window = register  # type: ignore[method-assign]
        memory(ranks, each)
    ranks.run(step)
    ranks.end()


def test_a_registration_that_fails_spoils_a_communicator_that_does_not_block() -> None:
    ranks = Ranks(2, options=NcclOptions(windows=True, blocking=False))

    def step(each: NcclPlane, rank: int) -> None:
        def register(*_: Any) -> int:
            raise NcclErrorDouble("unhandled cuda error")
        ranks.gpus[rank].blocking = False
        ranks.gpus[rank].register_window = register  # type: ignore[method-assign]
        with pytest.raises(HorovodInternalError, match=f"rank {rank}: .*unhandled cuda error; HVDLITE_NCCL_WINDOWS=0 does"):
            memory(ranks, each)
        each.close(HorovodInternalError("the job fails"))
    ranks.run(step)
    gc.collect()
    for gpu in ranks.gpus:
        gpu.end()
        assert not gpu.window_memory


def test_memory_that_outlives_the_communicators_is_freed_with_its_last_reference() -> None:
    ranks = Ranks(2)
    kept = ranks.run(lambda each, rank: memory(ranks, each))
    dropped = ranks.run(lambda each, rank: memory(ranks, each))
    assert windows(ranks) == [2, 2]
    del dropped
    gc.collect()
    ranks.end()
    assert windows(ranks) == [0, 0] and [len(gpu.window_memory) for gpu in ranks.gpus] == [1, 1]
    del kept
    gc.collect()
    assert not any(gpu.window_memory for gpu in ranks.gpus)


def test_windows_of_a_removed_process_set_ended_with_its_communicator() -> None:
    ranks = Ranks(2)

    def step(each: NcclPlane, rank: int) -> None:
        kept = memory(ranks, each)
        each.remove_process_set(0, spin)
        each.add_process_set(3, ranks.everybody)
        del kept
        gc.collect()
        memory(ranks, each)
        gc.collect()
        own = np.ones(4, np.float32)
        reduce(ranks, each, DeviceArray(own.ctypes.data, (4,), own.dtype, 0, own), process_set_id=3)
        assert len(ranks.gpus[rank].window_memory) == 1
    ranks.run(step)
    ranks.end()
    assert not any(gpu.window_memory for gpu in ranks.gpus)


def test_a_world_that_is_lost_while_ranks_agree_leaves_nothing() -> None:
    ranks = Ranks(2)
    arrived = threading.Event()

    def step(each: NcclPlane, rank: int) -> None:
        def lost(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
            if ranks.gpus[0].window_memory:  # the first rank's memory is there, and the other one does not agree
                raise HorovodInternalError("the world is lost")
            spin(predicate)
        own = np.ones(4, np.float32)
        reduce(ranks, each, DeviceArray(own.ctypes.data, (4,), own.dtype, 0, own))
        if rank == 0:
            with pytest.raises(HorovodInternalError, match="the world is lost"):
                each.fusion_buffer(BYTES, ranks.everybody, lost)
            arrived.set()
        assert arrived.wait(HANGS_SECONDS)
        each.close(HorovodInternalError("the world is lost"))
    ranks.run(step)
    gc.collect()
    assert not any(gpu.window_memory for gpu in ranks.gpus)
    for gpu in ranks.gpus:
        gpu.end()


@pytest.mark.parametrize("fails", [False, True])
def test_memory_of_a_window_is_freed_after_the_gpu_has_finished(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """`ncclMemFree` does not wait for it, `cudaFree` does."""
    cuda, freed = CudaDouble(), []
    device = cuda.device(monkeypatch, 2)

    def allocate(nbytes: int) -> int:
        assert cuda.getDevice() == 2
        if fails:
            raise NcclError("ncclMemAlloc", 1, "unhandled cuda error")
        return nbytes + 1

    def free(pointer: int) -> None:
        assert not cuda.allocated and cuda.getDevice() == 2
        freed.append(pointer)
    device._api = types.SimpleNamespace(allocate=allocate, free=free)  # type: ignore[assignment]
    if fails:
        with pytest.raises(device.failure):
            device.allocate_window(4096)
    else:
        pointer = device.allocate_window(4096)
        assert len(cuda.allocated) == 1
        device.free_window(pointer)
        assert freed == [4097]
    assert not cuda.allocated and cuda.contexts == {2}


# --- communicators that do not block ---------------------------------------------------------------------------------------


def test_a_lost_world_ends_while_nccl_waits_for_a_rank_that_does_not_come() -> None:
    """A blocking communicator is left behind with its thread; see `test_nccl_worlds.py`."""
    ranks = Ranks(2, options=NcclOptions(blocking=False))
    for gpu in ranks.gpus:
        gpu.blocking = False
    came, lost = threading.Event(), threading.Event()

    def complete(communicator: Any) -> None:
        assert lost.wait(HANGS_SECONDS)
        raise NcclErrorDouble("this rank is gone")
    ranks.gpus[1].complete = complete  # type: ignore[method-assign]
    real = ranks.gpus[0].complete

    def wait(communicator: Any) -> None:
        came.set()
        real(communicator)
    ranks.gpus[0].complete = wait  # type: ignore[method-assign]

    def step(each: NcclPlane, rank: int) -> None:
        def until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
            def lost_or() -> bool:
                return predicate() or (rank == 0 and came.is_set())
            spin(lost_or)
            if not predicate():
                raise HorovodInternalError("the world is lost")
        own = np.ones(4, np.float32)
        with pytest.raises(HorovodInternalError):
            response = Response(names=("x",), collective=Collective.ALLREDUCE, dtype="float32", op=ReduceOp.SUM,
                                contributors=ranks.everybody, device="cuda", elements=4)
            array = DeviceArray(own.ctypes.data, (4,), own.dtype, 0, own)
            each.execute(Plan(1, ranks.everybody, response, [array], [array]), until)
        each.close(HorovodInternalError("the world is lost"))
        if rank == 0:
            lost.set()
    ranks.run(step)
    assert ranks.gpus[0].closed_streams == 1, "its launch thread has ended, so that all could be released"
    assert not any(gpu.held()["communicators"] for gpu in ranks.gpus)
    for gpu in ranks.gpus:
        gpu.end()
