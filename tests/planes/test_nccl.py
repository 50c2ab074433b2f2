"""The plane for GPUs without one: what is launched when, and who waits for whom. Its ends are in `test_nccl_ends.py`."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hvdlite.core.device import DeviceArray
from hvdlite.core.errors import HorovodInternalError, MismatchError, UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.worlds import Gpus, allreduce, begun, spin
from tests.gpu_double.worlds import gpus as gpus

SUM, AVERAGE = ReduceOp.SUM, ReduceOp.AVERAGE


# --- through the runtime: negotiation, fusion and the host's plane beside it ---------------------------------------------


def test_every_collective_through_the_runtime(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        rank, size = runtime.world.rank, 3
        total = sum(range(1, size + 1))

        def result(handle: Any) -> Any:
            value = handle.wait()
            for completion in handle.completions():
                completion.wait()
            return value.owner if isinstance(value, DeviceArray) else value

        ones = np.full((4, 3), rank + 1.0, np.float32)
        array = gpus.wrap(runtime, ones.copy())
        assert (result(runtime.allreduce("a", array, array, SUM)) == total).all()
        group = [gpus.wrap(runtime, np.full(n, rank + 1, np.int32)) for n in (1, 5, 300)]
        result(runtime.grouped_allreduce("g", group, group, SUM))
        assert all((each.owner == total).all() for each in group)
        rows = np.full((rank, 2), rank, np.int16)
        assert result(runtime.allgather("ag", gpus.wrap(runtime, rows))).tolist() == [[1, 1], [2, 2], [2, 2]]
        mine = gpus.wrap(runtime, ones.copy())
        assert (result(runtime.broadcast("b", mine, 2)) == 3).all()
        part = result(runtime.reducescatter("rs", gpus.wrap(runtime, ones.copy()), AVERAGE))
        assert part.shape == ((2, 3) if rank == 0 else (1, 3)) and (part == 2).all()
        gathered = result(runtime.gather("gather", gpus.wrap(runtime, ones[:rank + 1].copy()), 1))
        assert gathered is None if rank != 1 else gathered[:, 0].tolist() == [1, 2, 2, 3, 3, 3]
        scattered = result(runtime.scatter("s", gpus.wrap(runtime, np.arange(5) + 10 * rank), 1))
        assert scattered.tolist() == [[10, 11], [12, 13], [14]][rank]
        received, counts = result(runtime.alltoall("a2a", gpus.wrap(runtime, np.arange(6.0) + 10 * rank), [1, 2, 3]))
        begin, length = [(0, 1), (1, 2), (3, 3)][rank]
        assert received.owner.tolist() == [10.0 * of + begin + i for of in range(3) for i in range(length)]
        assert counts.tolist() == [length] * 3
        out = np.zeros((4, 3), np.float32)
        target = gpus.wrap(runtime, out) if rank == 0 else None
        result(runtime.reduce("r", gpus.wrap(runtime, ones.copy()), target, 0, SUM))
        assert rank != 0 or (out == total).all()
        if rank == 0:
            result(runtime.send("p", gpus.wrap(runtime, ones.copy()), 2))
        elif rank == 2:
            place = np.zeros((4, 3), np.float32)
            result(runtime.receive("p", gpus.wrap(runtime, place), 0))
            assert (place == 1).all()
        on_host = np.full(3, rank + 1.0)
        assert (runtime.allreduce("host", on_host, on_host, SUM).wait() == total).all(), "the host's plane goes on beside it"
        runtime.barrier("end").wait()
    worlds.threads(3, step)
    assert all("allReduce" in gpu.launches for gpu in gpus.made)


def test_tensors_are_fused_into_one_call(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> int:
        values = [np.full(n, runtime.world.rank + 1.0, np.float32) for n in (3, 100, 1, 7000)]
        first = allreduce(gpus, runtime, "first", np.ones(1))
        first.wait()
        handles = [allreduce(gpus, runtime, f"t{n}", each, AVERAGE, prescale=2.0, postscale=5.0)
                   for n, each in enumerate(values)]
        for handle in handles:
            handle.wait()
            handle.completion.wait()
        assert all((each == 15.0).all() for each in values)
        return len(handles)
    worlds.threads(2, step)
    calls = gpus.made[0].launches.count("allReduce")
    assert calls <= 1 + 1 + 4, "the warm-up, the first, and at most four"


def test_a_joined_rank_helps_and_an_absent_one_counts_as_nothing(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        if rank == 2:
            runtime.join().wait()
            return
        values = [np.full(n, rank + 1.0, np.float32) for n in (3, 77)]
        handles = [allreduce(gpus, runtime, f"x{n}", each) for n, each in enumerate(values)]
        for handle in handles:
            handle.wait()
            handle.completion.wait()
        assert all((each == 3).all() for each in values)
        low = np.full(5, rank + 1, np.int32)
        handle = allreduce(gpus, runtime, "min", low, ReduceOp.MIN)
        handle.wait()
        handle.completion.wait()
        assert (low == 1).all(), "who has joined has the op's identity"
        root = gpus.wrap(runtime, np.full(4, rank + 1.0))
        handle = runtime.broadcast("b", root, 1)
        handle.wait()
        handle.completion.wait()
        assert (root.owner == 2).all()
        rows = runtime.allgather("rows", gpus.wrap(runtime, np.full((2, 2), rank)))
        assert rows.wait().owner.shape == (4, 2)
        rows.completion.wait()
        mean = np.full(6, rank + 1.0)
        runtime.join().wait()
        del mean
    worlds.threads(3, step)


def test_process_sets_have_communicators_of_their_own(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        process_set_id = runtime.add_process_set([0, 2]).wait()
        values = np.full(9, rank + 1.0)
        if rank != 1:
            handle = allreduce(gpus, runtime, "pair", values, process_set=process_set_id)
            handle.wait()
            handle.completion.wait()
            assert (values == 4).all()
        runtime.remove_process_set(process_set_id).wait()
        everybody = np.full(9, rank + 1.0)
        handle = allreduce(gpus, runtime, "all", everybody)
        handle.wait()
        handle.completion.wait()
        assert (everybody == 6).all()
    worlds.threads(3, step)


def test_ranks_that_disagree_about_the_device_are_told(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        values = np.ones(3)
        array = gpus.wrap(runtime, values) if runtime.world.rank else values
        with pytest.raises(MismatchError, match=r"device.*rank 0: cpu; rank 1: cuda"):
            runtime.allreduce("x", array, array, SUM).wait()
    worlds.threads(2, step)


# --- streams -------------------------------------------------------------------------------------------------------------


def test_the_host_waits_for_the_launch_only(gpus: Gpus) -> None:
    held, checked = threading.Barrier(2), threading.Barrier(2)

    def step(runtime: Runtime) -> None:
        rank, gpu = runtime.world.rank, begun(gpus, runtime)
        mine = gpu.make_stream()
        gpu.hold(gpu.stream)
        held.wait()
        values = np.full(1000, rank + 1.0)
        handle = allreduce(gpus, runtime, "x", values)
        handle.wait(10)  # docs/protocol.md#gpu-streams: returns although the GPU has done nothing
        assert not handle.completion.is_done() and (values == rank + 1).all()
        seen: list[bool] = []
        handle.completion.block_stream(mine)  # does not wait either
        gpu.launch(mine, "look", lambda: seen.append(bool((values == 3).all())))
        assert not seen
        checked.wait()
        gpu.release(gpu.stream)
        handle.completion.wait()
        spin(lambda: bool(seen))
        assert seen == [True], "what follows on the framework's stream comes after the result"
    worlds.threads(2, step)


def test_what_the_producer_has_not_finished_is_waited_for_on_the_gpu(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        runtime.devices.record_event(0)  # opens the GPU
        gpu = gpus.made[rank]
        producer = gpu.make_stream()
        gpu.hold(producer)
        values = np.zeros(500)
        gpu.launch(producer, "compute", lambda: values.fill(rank + 1.0))
        handle = allreduce(gpus, runtime, "x", values, stream=producer)
        handle.wait(10)
        assert (values == 0).all()
        gpu.release(producer)
        handle.completion.wait()
        assert (values == 3).all()
    worlds.threads(2, step)


def test_a_graph_capture_and_a_second_gpu_are_refused_at_the_call(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        values = np.ones(3)
        gpus.wrap(runtime, values)
        with pytest.raises(UnsupportedError, match="cannot also use GPU 1"):
            runtime.devices.wrap(values.ctypes.data, (3,), values.dtype, 1, stream=0, owner=values)
        before = allreduce(gpus, runtime, "before", values)
        before.wait()
        gpus.made[0].graph = True
        with pytest.raises(UnsupportedError, match="CUDA graph"):
            gpus.wrap(runtime, values)
        with pytest.raises(UnsupportedError, match="CUDA graph"):
            before.completion.block_stream(0)
        gpus.made[0].graph = False
        allreduce(gpus, runtime, "x", values).wait()
    worlds.threads(1, step)


def test_without_kernels_copies_still_work_and_factors_say_what_is_missing(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        runtime.devices.record_event(0)
        gpus.made[runtime.world.rank].kernels = False
        values = [np.full(n, runtime.world.rank + 1.0) for n in (2, 9)]
        arrays = [gpus.wrap(runtime, each) for each in values]
        handle = runtime.grouped_allreduce("g", arrays, arrays, SUM)
        handle.wait()
        for completion in handle.completions():
            completion.wait()
        assert all((each == 3).all() for each in values)
        if runtime.world.rank == 0:
            with pytest.raises(HorovodInternalError, match="NVRTC"):
                allreduce(gpus, runtime, "x", np.ones(3), prescale=0.5).wait()
        else:
            with pytest.raises(HorovodInternalError):
                allreduce(gpus, runtime, "x", np.ones(3), prescale=0.5).wait()
    worlds.threads(2, step)
