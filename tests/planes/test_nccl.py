"""The plane for GPUs without one: what is launched when, who waits for whom, and every way to end."""

from __future__ import annotations

import gc
import importlib.util
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.device import DeviceArray
from hvdlite.core.errors import HorovodInternalError, MismatchError, UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.planes.base import WaitUntil
from hvdlite.planes.launch_thread import LaunchThread
from hvdlite.planes.nccl import kernels, library
from hvdlite.planes.nccl.introduction import Introduction, check
from hvdlite.planes.nccl.watcher import Lease, abort
from hvdlite.runtime import assemble
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.device_double import CommunicatorDouble, GpuDouble, Gpus, Meetings, NcclErrorDouble, plane

SUM, AVERAGE = ReduceOp.SUM, ReduceOp.AVERAGE


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    made = Gpus()
    real = assemble.assemble_threads
    monkeypatch.setattr(worlds, "assemble_threads",
                        lambda *arguments, **options: real(*arguments, **{"devices": made.plane, **options}))
    yield made
    made.end()


def spin(predicate: Callable[[], bool]) -> None:
    """The simplest `WaitUntil`."""
    deadline = time.monotonic() + 20
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def allreduce(gpus: Gpus, runtime: Runtime, name: str, values: Any, op: ReduceOp = SUM, stream: int = 0,
              **options: Any) -> Any:
    array = gpus.lend(runtime, values, stream)
    return runtime.allreduce(name, array, array, op, **options)


def begun(gpus: Gpus, runtime: Runtime, process_set: int = 0) -> GpuDouble:
    """Return this rank's GPU, after a first collective has made the communicator and is done."""
    first = allreduce(gpus, runtime, "first", np.ones(2), process_set=process_set)
    first.wait()
    first.completion.wait()
    return gpus.made[runtime.world.rank]


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
        lent = gpus.lend(runtime, ones.copy())
        assert (result(runtime.allreduce("a", lent, lent, SUM)) == total).all()
        group = [gpus.lend(runtime, np.full(n, rank + 1, np.int32)) for n in (1, 5, 300)]
        result(runtime.grouped_allreduce("g", group, group, SUM))
        assert all((each.owner == total).all() for each in group)
        rows = np.full((rank, 2), rank, np.int16)
        assert result(runtime.allgather("ag", gpus.lend(runtime, rows))).tolist() == [[1, 1], [2, 2], [2, 2]]
        mine = gpus.lend(runtime, ones.copy())
        assert (result(runtime.broadcast("b", mine, 2)) == 3).all()
        part = result(runtime.reducescatter("rs", gpus.lend(runtime, ones.copy()), AVERAGE))
        assert part.shape == ((2, 3) if rank == 0 else (1, 3)) and (part == 2).all()
        gathered = result(runtime.gather("gather", gpus.lend(runtime, ones[:rank + 1].copy()), 1))
        assert gathered is None if rank != 1 else gathered[:, 0].tolist() == [1, 2, 2, 3, 3, 3]
        scattered = result(runtime.scatter("s", gpus.lend(runtime, np.arange(5) + 10 * rank), 1))
        assert scattered.tolist() == [[10, 11], [12, 13], [14]][rank]
        received, counts = result(runtime.alltoall("a2a", gpus.lend(runtime, np.arange(6.0) + 10 * rank), [1, 2, 3]))
        begin, length = [(0, 1), (1, 2), (3, 3)][rank]
        assert received.owner.tolist() == [10.0 * of + begin + i for of in range(3) for i in range(length)]
        assert counts.tolist() == [length] * 3
        out = np.zeros((4, 3), np.float32)
        target = gpus.lend(runtime, out) if rank == 0 else None
        result(runtime.reduce("r", gpus.lend(runtime, ones.copy()), target, 0, SUM))
        assert rank != 0 or (out == total).all()
        if rank == 0:
            result(runtime.send("p", gpus.lend(runtime, ones.copy()), 2))
        elif rank == 2:
            place = np.zeros((4, 3), np.float32)
            result(runtime.receive("p", gpus.lend(runtime, place), 0))
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
        root = gpus.lend(runtime, np.full(4, rank + 1.0))
        handle = runtime.broadcast("b", root, 1)
        handle.wait()
        handle.completion.wait()
        assert (root.owner == 2).all()
        rows = runtime.allgather("rows", gpus.lend(runtime, np.full((2, 2), rank)))
        assert rows.wait().owner.shape == (4, 2)
        rows.completion.wait()
        mean = np.full(6, rank + 1.0)
        runtime.join().wait()
        del mean
    worlds.threads(3, step)


def test_process_sets_have_communicators_of_their_own(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        number = runtime.add_process_set([0, 2]).wait()
        values = np.full(9, rank + 1.0)
        if rank != 1:
            handle = allreduce(gpus, runtime, "pair", values, process_set=number)
            handle.wait()
            handle.completion.wait()
            assert (values == 4).all()
        runtime.remove_process_set(number).wait()
        everybody = np.full(9, rank + 1.0)
        handle = allreduce(gpus, runtime, "all", everybody)
        handle.wait()
        handle.completion.wait()
        assert (everybody == 6).all()
    worlds.threads(3, step)


def test_ranks_that_disagree_about_the_device_are_told(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        values = np.ones(3)
        array = gpus.lend(runtime, values) if runtime.world.rank else values
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
        handle.wait(10)  # PROTOCOL rule 25: returns although the GPU has done nothing
        assert not handle.completion.passed() and (values == rank + 1).all()
        seen: list[bool] = []
        handle.completion.follow(mine)  # does not wait either
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
        runtime.devices.ready(0)  # opens the GPU
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


def test_memory_is_held_until_somebody_follows_or_the_work_is_done(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        gpu = begun(gpus, runtime)
        gpu.hold(gpu.stream)
        alive = []
        for follows in (True, False):
            values = np.ones(10)
            watched = np.ndarray.__new__(_Watched, values.shape)
            handle = allreduce(gpus, runtime, f"x{follows}", watched)
            alive.append(weakref.ref(watched))
            del watched
            handle.wait()
            assert alive[-1]() is not None
            if follows:
                handle.completion.follow(gpu.make_stream())
            del handle
            gc.collect()
        assert alive[0]() is None, "the framework's stream is behind the work: its allocator is in the right order"
        assert alive[1]() is not None
        gpu.release(gpu.stream)
        spin(lambda: gc.collect() >= 0 and alive[1]() is None)
    worlds.threads(1, step)


class _Watched(np.ndarray):
    """An array that can be referred to weakly."""


def test_a_graph_capture_and_a_second_gpu_are_refused_at_the_call(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        values = np.ones(3)
        gpus.lend(runtime, values)
        with pytest.raises(UnsupportedError, match="cannot also use GPU 1"):
            runtime.devices.lend(values.ctypes.data, (3,), values.dtype, 1, stream=0, owner=values)
        before = allreduce(gpus, runtime, "before", values)
        before.wait()
        gpus.made[0].graph = True
        with pytest.raises(UnsupportedError, match="CUDA graph"):
            gpus.lend(runtime, values)
        with pytest.raises(UnsupportedError, match="CUDA graph"):
            before.completion.follow(0)
        gpus.made[0].graph = False
        allreduce(gpus, runtime, "x", values).wait()
    worlds.threads(1, step)


def test_without_kernels_copies_still_work_and_factors_say_what_is_missing(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        runtime.devices.ready(0)
        gpus.made[runtime.world.rank].has_kernels = False
        values = [np.full(n, runtime.world.rank + 1.0) for n in (2, 9)]
        arrays = [gpus.lend(runtime, each) for each in values]
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


# --- failures and the end ------------------------------------------------------------------------------------------------


def test_a_joined_rank_stays_until_what_it_helped_with_is_done(gpus: Gpus) -> None:
    values = [np.full(10, rank + 1.0) for rank in range(3)]

    def step(runtime: Runtime) -> None:
        rank, gpu = runtime.world.rank, begun(gpus, runtime)
        if rank == 2:
            gpu.hold(gpu.stream)
            threading.Timer(0.3, gpu.release, [gpu.stream]).start()  # it has nothing left to do by then, but to help
        else:
            allreduce(gpus, runtime, "x", values[rank]).wait()
        runtime.join().wait()
    worlds.threads(3, step)
    assert all((each == 3).all() for each in values[:2]), "it ended its communicators before its part was done"


def _scattered(gpus: Gpus, runtime: Runtime, process_set: int = 0) -> Any:
    """Let rank 0 send to rank 1, whose GPU comes to it later; return rank 1's result."""
    gpu = begun(gpus, runtime, process_set)
    if runtime.world.rank == 1:
        gpu.hold(gpu.stream)
    handle = runtime.scatter("s", gpus.lend(runtime, np.full(4, 7.0)), 0, process_set=process_set)
    return handle.wait().owner


def test_what_is_on_its_way_arrives_although_the_sender_is_done_and_leaves(gpus: Gpus) -> None:
    gpus.options["parting"] = 20.0
    results: dict[int, Any] = {}

    def step(runtime: Runtime) -> None:
        results[runtime.world.rank] = _scattered(gpus, runtime)
        if runtime.world.rank == 1:
            gpu = gpus.made[1]
            threading.Timer(0.3, gpu.release, [gpu.stream]).start()
    worlds.threads(2, step)
    assert (results[1] == 7).all(), "the sender ended the communicator when its own part was done"


def test_who_leaves_long_before_the_others_does_not_wait_for_them(gpus: Gpus, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hvdlite")
    gpus.options["parting"] = 0.2
    left = threading.Event()

    def step(runtime: Runtime) -> None:
        begun(gpus, runtime)
        if runtime.world.rank == 1:
            runtime.shutdown()
            left.set()
        assert left.wait(20)
    worlds.threads(2, step)
    assert "rank 1: left without the others' GPUs: TimeoutError" in caplog.text


def test_ranks_of_a_removed_set_wait_for_each_others_gpus(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        number = runtime.add_process_set([0, 1]).wait()
        if rank < 2:
            result = _scattered(gpus, runtime, number)
            if rank == 1:
                gpu = gpus.made[rank]
                threading.Timer(0.2, gpu.release, [gpu.stream]).start()
        runtime.remove_process_set(number).wait()
        assert rank != 1 or (result == 7).all(), "the sender ended the communicator when its own part was done"
    worlds.threads(3, step)


def test_communicators_end_only_when_nobody_looks_at_them(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, ended, real = threading.Event(), threading.Event(), CommunicatorDouble.abort
    late: list[bool] = []

    def check(communicator: CommunicatorDouble) -> None:
        looks.set()
        time.sleep(0.2)
        late.append(ended.is_set())

    def abort(communicator: CommunicatorDouble) -> None:
        ended.set()
        real(communicator)
    monkeypatch.setattr(CommunicatorDouble, "check_async_error", check)
    monkeypatch.setattr(CommunicatorDouble, "abort", abort)

    def step(runtime: Runtime) -> None:
        gpu = begun(gpus, runtime)
        gpu.hold(gpu.stream)
        allreduce(gpus, runtime, "x", np.ones(2)).wait()
        assert looks.wait(20)
        runtime.fail("Done", "the test ends here", "")
    worlds.threads(1, step)
    assert late and not any(late), "NCCL was asked about a communicator while it was being freed"


def test_no_memory_says_where(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        begun(gpus, runtime).memory = 1 << 16
        arrays = [gpus.lend(runtime, np.ones(1 << 14)) for _ in range(2)]
        with pytest.raises(HorovodInternalError, match=r"rank \d: out of memory in allreduce of 'g'.* on GPU 0"):
            runtime.grouped_allreduce("g", arrays, arrays, SUM).wait()
    worlds.threads(2, step)


def test_what_nccl_says_reaches_all_ranks_with_the_rank_that_met_it(gpus: Gpus) -> None:
    gpus.meetings.refuses = "NCCL_ERROR_SYSTEM_ERROR: no route"

    def step(runtime: Runtime) -> str:
        with pytest.raises(HorovodInternalError) as caught:
            allreduce(gpus, runtime, "x", np.ones(3)).wait(20)
        return str(caught.value)
    for text in worlds.threads(2, step):
        assert "NCCL failed in making a communicator of ranks [0, 1] on GPU 0" in text and "no route" in text


def test_an_error_in_work_under_way_ends_the_job_naming_the_rank(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        gpu = begun(gpus, runtime)
        gpu.hold(gpu.stream)
        handle = allreduce(gpus, runtime, "x", np.ones(3))
        handle.wait()
        if runtime.world.rank == 1:
            gpu.error = NcclErrorDouble("NCCL_ERROR_REMOTE: a cable was pulled")
        with pytest.raises(HorovodInternalError, match=r"rank 1.*a cable was pulled"):
            while True:
                handle.completion.follow(gpu.make_stream())
                allreduce(gpus, runtime, "y", np.ones(3)).wait(20)
        gpu.error = None
        gpu.release(gpu.stream)
    with pytest.raises(HorovodInternalError):  # the world's own shutdown tells it again
        worlds.threads(2, step)
        raise HorovodInternalError


def test_a_rank_that_dies_while_a_communicator_is_made_is_an_error_on_the_others(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 0:
            with pytest.raises(HorovodInternalError, match="rank 1"):
                allreduce(gpus, runtime, "x", np.ones(3)).wait(20)
        else:
            runtime._devices._meet = _raise  # type: ignore[union-attr]
            with pytest.raises(HorovodInternalError):
                allreduce(gpus, runtime, "x", np.ones(3)).wait(20)
    worlds.threads(2, step)


def _raise(*_: Any) -> None:
    raise HorovodInternalError("it stopped")


def test_ranks_on_one_gpu_are_named_unless_it_is_allowed(gpus: Gpus) -> None:
    one, other = Introduction("a", "GPU-1", 22809), Introduction("a", "GPU-1", 22809)
    with pytest.raises(HorovodInternalError, match=r"ranks 0 and 3 use the same GPU.*torch.cuda.set_device"):
        check({0: one, 3: other}, shared=False)
    check({0: one, 3: other}, shared=True)
    check({0: Introduction("a", "0000:01", 22809), 1: Introduction("b", "0000:01", 22809)}, shared=False)
    with pytest.raises(HorovodInternalError, match=r"rank 0 has NCCL 2.28.9 and rank 1 has 2.27.3"):
        check({0: one, 1: Introduction("a", "GPU-2", 22703)}, shared=False)
    gpus.options["shared_gpu"] = False
    real = gpus.plane

    def same(rank: int, swap: Any, wake: Any) -> Any:
        made = real(rank, swap, wake)
        gpus.made[-1].gpu = "GPU-7"
        return made
    gpus.plane = same  # type: ignore[method-assign]

    def step(runtime: Runtime) -> None:
        with pytest.raises(HorovodInternalError, match="ranks 0 and 1 use the same GPU"):
            allreduce(gpus, runtime, "x", np.ones(3)).wait(20)
    worlds.threads(2, step)


def test_nobody_but_an_abort_ends_a_communicator() -> None:
    class Communicator:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    communicator = Communicator()
    watch, lease = weakref.ref(communicator), Lease(communicator)  # type: ignore[arg-type]
    del communicator
    lease_again, lease = lease, None  # type: ignore[assignment]
    communicator = lease_again.communicator  # type: ignore[assignment]
    del lease_again
    gc.collect()
    assert watch() is not None
    again = Lease(communicator)  # type: ignore[arg-type]
    again.end()
    assert communicator.aborted
    del communicator, again
    gc.collect()
    assert watch() is not None, "one of two leases has not ended"


def test_aborts_run_side_by_side_and_a_stuck_one_is_left_behind() -> None:
    gpu, stuck, both = GpuDouble(), threading.Event(), threading.Barrier(3)

    class Communicator:
        def __init__(self, hangs: bool) -> None:
            self.hangs = hangs

        def abort(self) -> None:
            both.wait(10)  # neither waits for the other
            if self.hangs:
                stuck.wait(20)

    leases = [Lease(Communicator(hangs)) for hangs in (False, False, True)]  # type: ignore[arg-type]
    began = time.monotonic()
    assert abort(leases, gpu, 0.5) == 1
    assert time.monotonic() - began < 10
    stuck.set()
    gpu.end()


def test_work_under_way_is_finished_before_the_end(gpus: Gpus) -> None:
    results = [np.full(10, rank + 1.0) for rank in range(2)]

    def step(runtime: Runtime) -> None:
        allreduce(gpus, runtime, "x", results[runtime.world.rank]).wait()
    worlds.threads(2, step)
    assert all((result == 3).all() for result in results), "shutdown() came after the launch, and must not undo it"


def test_a_call_that_does_not_return_is_abandoned() -> None:
    stuck, ended = threading.Event(), []

    class JobEndedError(Exception):
        pass

    def gives_up(predicate: Callable[[], bool]) -> None:
        if not predicate():
            raise JobEndedError
    thread = LaunchThread("test", lambda: ended.append(1), lambda: None)
    with pytest.raises(JobEndedError):
        thread.run(lambda: stuck.wait(20), gives_up)
    assert not thread.end(0.05)
    stuck.set()
    assert thread.end(10) and ended

    wait: WaitUntil = spin
    other = LaunchThread("test", lambda: None)
    assert other.run(lambda: 7, wait) == 7
    with pytest.raises(ZeroDivisionError):
        other.run(lambda: 1 // 0, wait)
    assert other.end(10)
    broken = LaunchThread("test", lambda: None, lambda: _raise())
    with pytest.raises(HorovodInternalError, match="it stopped"):
        broken.run(lambda: 7, wait)


def test_the_communicators_id_is_made_once(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    real = Meetings.new_id
    monkeypatch.setattr(Meetings, "new_id", lambda self: made.append(real(self)) or made[-1])

    def step(runtime: Runtime) -> None:
        for index in range(3):
            allreduce(gpus, runtime, f"x{index}", np.ones(3)).wait()
    worlds.threads(3, step)
    assert len(made) == 1, "every id is a listening thread in NCCL"


# --- what NCCL can do, and finding it --------------------------------------------------------------------------------------


def test_what_it_carries() -> None:
    gpu = GpuDouble()
    access = plane(0, None, lambda: None, gpu)
    for dtype in SUPPORTED_DTYPES:
        for collective in (Collective.BROADCAST, Collective.ALLGATHER, Collective.ALLTOALL, Collective.SEND):
            assert access.carries(collective, None, dtype)
    reduces = {dtype for dtype in SUPPORTED_DTYPES if access.carries(Collective.ALLREDUCE, SUM, dtype)}
    assert reduces == set(SUPPORTED_DTYPES) - {"bool", "int16", "uint16"}
    assert access.carries(Collective.ALLREDUCE, ReduceOp.MAX, "bool")
    assert not access.carries(Collective.ALLREDUCE, ReduceOp.PRODUCT, "complex64")
    assert not access.carries(Collective.ALLREDUCE, ReduceOp.ADASUM, "float32")
    gpu.end()


def test_without_cupy_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(library, "cuda_of_torch", lambda: 13)
    assert library.missing() == "CuPy is not installed: pip install 'hvdlite[nccl-cuda13]'"
    without = plane(0, None, lambda: None, GpuDouble())
    without._missing = library.missing
    with pytest.raises(UnsupportedError, match="nccl-cuda13"):
        without.ready(0)


@pytest.mark.parametrize(("version", "requires", "expected"), [
    ("2.11.0+cu130", [], 13), ("2.6.0+cu124", [], 12), ("2.13.0+cpu", [], None),
    ("2.11.0", ["numpy", "nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'"], 13), ("2.11.0", ["numpy"], None)])
def test_cuda_of_torch(version: str, requires: list[str], expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.sys.modules, "torch", None)
    monkeypatch.setattr(library.importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(library.importlib.metadata, "requires", lambda name: requires)
    assert library.cuda_of_torch() == expected


def test_one_copy_of_nccl_new_enough(tmp_path: Any) -> None:
    library.check(22809, {"/a/libnccl.so.2"})
    with pytest.raises(HorovodInternalError, match=r"2 copies.*/a/libnccl.so.2, /b/libnccl.so.2"):
        library.check(22809, {"/b/libnccl.so.2", "/a/libnccl.so.2"})
    with pytest.raises(HorovodInternalError, match=r"NCCL 2.16.2 is too old; 2.18.1"):
        library.check(21602, set())
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 12 /x/libnccl.so.2\n7f02-7f03 r--p 00000000 08:01 12 /x/libnccl.so.2\n"
                    "7f04-7f05 r--p 00000000 08:01 13 /y/libc.so.6\n", encoding="utf-8")
    assert library.copies(str(maps)) == {"/x/libnccl.so.2"}
    assert library.copies("/nowhere") == set()


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(HorovodInternalError, match="NCCL_COMM_BLOCKING"):
        library.load({"NCCL_COMM_BLOCKING": "0"})


def test_cupy_that_blocks_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"cupy": types.SimpleNamespace(__version__="13.6.0"), "cupy.cuda.nccl": types.SimpleNamespace(available=True)}
    monkeypatch.setattr(library.importlib, "import_module", modules.__getitem__)
    with pytest.raises(HorovodInternalError, match=r"CuPy 13.6.0 is too old; 14 is the oldest.*pip install 'hvdlite\[nccl"):
        library.load({})


def test_the_real_library_without_a_gpu() -> None:
    """CuPy and NCCL load, ids are made, and errors come with NCCL's text, on any machine that has them installed."""
    pytest.importorskip("cupy", reason="needs CuPy")
    from hvdlite.planes.nccl.device import CupyDevice
    cupy = library.load({})
    if not cupy.cuda.nccl.available:
        pytest.skip("needs NCCL")
    assert len(library.copies()) == 1
    assert cupy.cuda.nccl.get_version() >= library.OLDEST
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if count:
        pytest.skip("there is a GPU: tests/gpu")
    device = object.__new__(CupyDevice)
    device._cupy, device._nccl, device._runtime = cupy, cupy.cuda.nccl, cupy.cuda.runtime
    first, second = device.unique_id(), device.unique_id()
    assert len(first) == 128 and first != second
    with device.group():
        pass
    with pytest.raises(cupy.cuda.nccl.NcclError) as caught:
        device.communicator(1, first, 0)
    assert "NCCL_ERROR_UNHANDLED_CUDA_ERROR" in device.explain(None, caught.value)
    # A communicator that was never made says so: the arguments themselves are as CuPy wants them.
    none, runtime = cupy.cuda.nccl.NcclCommunicator.__new__(cupy.cuda.nccl.NcclCommunicator), cupy.cuda.runtime
    for call in (lambda: none.allReduce(256, 512, 10, 7, 0, 0), lambda: none.reduce(256, 512, 10, 7, 0, 1, 0),
                 lambda: none.broadcast(256, 512, 10, 1, 0, 0), lambda: none.reduceScatter(256, 512, 10, 7, 0, 0),
                 lambda: none.allGather(256, 512, 10, 1, 0), lambda: none.send(256, 10, 1, 0, 0),
                 lambda: none.recv(256, 10, 1, 0, 0), none.check_async_error):
        with pytest.raises(cupy.cuda.nccl.NcclError, match="invalid argument"):
            call()
    for call in (lambda: device.make_event(), lambda: device._runtime.eventRecord(1, 0), lambda: device.passed(1),
                 lambda: runtime.streamWaitEvent(0, 1), lambda: device.capturing(0), lambda: device.copy(1, 2, 3, 0),
                 lambda: runtime.memsetAsync(1, 0, 1, 0), lambda: runtime.deviceGetPCIBusId(0),
                 lambda: runtime.eventCreateWithFlags(runtime.eventDisableTiming), lambda: cupy.cuda.memory.Memory(256),
                 lambda: runtime.streamCreateWithPriority(runtime.streamNonBlocking, -5)):
        device.index = 0
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            call()
    assert issubclass(cupy.cuda.driver.CUDADriverError, RuntimeError)
    function, (table,) = cupy.cuda.Function.__new__(cupy.cuda.Function), kernels.tables([(256, 512, 10)], 1024)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):  # and not a TypeError: a table is an argument by value
        device._start(types.SimpleNamespace(kernel=function), 1, table, 0)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        CupyDevice(0, 0, {})
