"""How the NCCL plane fails and ends, over a double of GPUs and NCCL: deaths, errors, aborts, leaving early and late."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError, PeerLostError
from hvdlite.core.types import ReduceOp
from hvdlite.planes.base import WaitUntil
from hvdlite.planes.launch_thread import LaunchThread
from hvdlite.planes.nccl.communicators import CommunicatorRef, PeerInfo, abort, check_peers
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.gpu import GpuDouble, plane
from tests.gpu_double.nccl import CommunicatorDouble, Meetings, NcclErrorDouble
from tests.gpu_double.worlds import Gpus, allreduce, begun, spin
from tests.gpu_double.worlds import gpus as gpus

SUM, AVERAGE = ReduceOp.SUM, ReduceOp.AVERAGE


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
    handle = runtime.scatter("s", gpus.wrap(runtime, np.full(4, 7.0)), 0, process_set=process_set)
    return handle.wait().owner


def test_what_is_on_its_way_arrives_although_the_sender_is_done_and_leaves(gpus: Gpus) -> None:
    gpus.options["exit_timeout"] = 20.0
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
    gpus.options["exit_timeout"] = 0.2
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
        process_set_id = runtime.add_process_set([0, 1]).wait()
        if rank < 2:
            result = _scattered(gpus, runtime, process_set_id)
            if rank == 1:
                gpu = gpus.made[rank]
                threading.Timer(0.2, gpu.release, [gpu.stream]).start()
        runtime.remove_process_set(process_set_id).wait()
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
                handle.completion.block_stream(gpu.make_stream())
                allreduce(gpus, runtime, "y", np.ones(3)).wait(20)
        gpu.error = None
        gpu.release(gpu.stream)
    with pytest.raises(HorovodInternalError):  # the world's own shutdown tells it again
        worlds.threads(2, step)
        raise HorovodInternalError


@pytest.mark.parametrize("seconds", [30.0, 0.2], ids=["named", "nobody knows"])
@pytest.mark.parametrize("when", ["making", "launching", "under way"])
def test_if_nccl_hears_first_that_a_rank_is_gone_the_verdict_is_waited_for(gpus: Gpus, when: str, seconds: float,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.options["verdict_seconds"] = seconds
    lost = NcclErrorDouble("NCCL_ERROR_REMOTE_ERROR: a peer is gone", 6)
    failed = threading.Event()

    def fail(*_: Any) -> None:
        failed.set()
        raise lost

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        if when == "making":
            runtime.devices.record_event(0)
        gpu = gpus.made[rank] if when == "making" else begun(gpus, runtime)
        if rank == 1:
            allreduce(gpus, runtime, "x", np.ones(3))
            assert failed.wait(20)
            if seconds == 30.0:
                runtime.fail("Died", "out of reach", "")
            with pytest.raises(HorovodInternalError):
                allreduce(gpus, runtime, "y", np.ones(3)).wait(20)
            # No abort reaches a thread in ncclCommInitRank whose peer never comes: it is left behind.
            left = {thread.name for thread in threading.enumerate()}
            assert when != "making" or "hvdlite-nccl-1" in left
            return
        if when == "making":
            monkeypatch.setattr(gpu.device, "communicator", fail)
        else:
            (communicator,) = gpu.nccl.communicators
            monkeypatch.setattr(communicator, "allReduce" if when == "launching" else "check_async_error", fail)
            gpu.hold(gpu.stream)
        with pytest.raises(PeerLostError) as caught:
            while True:
                handle = allreduce(gpus, runtime, "x", np.ones(3))
                handle.wait(20)
                handle.completion.block_stream(gpu.make_stream())
        assert caught.value.rank == (1 if seconds == 30.0 else -1), caught.value
        if seconds != 30.0:
            assert "a peer is gone" in str(caught.value) and "A rank has died" in str(caught.value)
        gpu.release(gpu.stream)
    worlds.threads(2, step)


def test_leaving_is_no_verdict() -> None:
    for failure in (None, HorovodInternalError("rank 1 was lost")):
        used = plane(0, None, lambda: None, GpuDouble(), verdict_seconds=0.01)
        used.close(failure)
        assert used._verdict() == (failure is not None)


def test_a_rank_that_dies_while_a_communicator_is_made_is_an_error_on_the_others(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 0:
            with pytest.raises(HorovodInternalError, match="rank 1"):
                allreduce(gpus, runtime, "x", np.ones(3)).wait(20)
        else:
            gpus.made[1].device.bus_id = _raise  # type: ignore[method-assign]
            with pytest.raises(HorovodInternalError):
                allreduce(gpus, runtime, "x", np.ones(3)).wait(20)
    worlds.threads(2, step)


def _raise(*_: Any) -> None:
    raise HorovodInternalError("it stopped")


# docs/protocol.md#one-gpu-per-rank
def test_ranks_on_one_gpu_are_named_unless_it_is_allowed(gpus: Gpus) -> None:
    one, other = PeerInfo("a", "GPU-1", "x", 22809), PeerInfo("a", "GPU-1", "x", 22809)
    with pytest.raises(HorovodInternalError, match=r"ranks 0 and 3 use the same GPU.*torch.cuda.set_device"):
        check_peers({0: one, 3: other}, shared=False)
    check_peers({0: one, 3: other}, shared=True)
    slices = {rank: PeerInfo("a", "GPU-1", uuid, 22809) for rank, uuid in enumerate("xy")}
    with pytest.raises(HorovodInternalError, match=r"ranks 0 and 1 use slices \(MIG\) of one GPU.*NCCL 2.28.9 refuses"):
        check_peers(slices, shared=False)
    slices = {rank: PeerInfo("a", "GPU-1", uuid, 23007) for rank, uuid in enumerate("xyy")}
    check_peers({rank: slices[rank] for rank in (0, 1)}, shared=False)
    with pytest.raises(HorovodInternalError, match="ranks 1 and 2 use the same GPU"):
        check_peers(slices, shared=False)
    check_peers({0: PeerInfo("a", "0000:01", "x", 22809), 1: PeerInfo("b", "0000:01", "y", 22809)}, shared=False)
    with pytest.raises(HorovodInternalError, match=r"rank 0 has NCCL 2.28.9 and rank 1 has 2.27.3"):
        check_peers({0: one, 1: PeerInfo("a", "GPU-2", "y", 22703)}, shared=False)
    gpus.options["shared_gpu"] = False
    real = gpus.plane

    def same(rank: int, oob: Any, wake: Any) -> Any:
        made = real(rank, oob, wake)
        gpus.made[-1].identity = "GPU-7"
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
    watch, ref = weakref.ref(communicator), CommunicatorRef(communicator)  # type: ignore[arg-type]
    del communicator
    kept, ref = ref, None  # type: ignore[assignment]
    communicator = kept.communicator  # type: ignore[assignment]
    del kept
    gc.collect()
    assert watch() is not None
    again = CommunicatorRef(communicator)  # type: ignore[arg-type]
    again.end()
    assert communicator.aborted
    del communicator, again
    gc.collect()
    assert watch() is not None, "one of two refs has not ended"


def test_aborts_run_side_by_side_and_a_stuck_one_is_left_behind() -> None:
    gpu, stuck, both = GpuDouble(), threading.Event(), threading.Barrier(3)

    class Communicator:
        def __init__(self, hangs: bool) -> None:
            self.hangs = hangs

        def abort(self) -> None:
            both.wait(10)  # neither waits for the other
            if self.hangs:
                stuck.wait(20)

    refs = [CommunicatorRef(Communicator(hangs)) for hangs in (False, False, True)]  # type: ignore[arg-type]
    began = time.monotonic()
    assert abort(refs, gpu.device, 0.5) == 1
    assert time.monotonic() - began < 10
    stuck.set()
    gpu.end()


def test_work_under_way_is_finished_before_the_end(gpus: Gpus) -> None:
    results = [np.full(10, rank + 1.0) for rank in range(2)]

    def step(runtime: Runtime) -> None:
        allreduce(gpus, runtime, "x", results[runtime.world.rank]).wait()
    worlds.threads(2, step)
    assert all((result == 3).all() for result in results), "shutdown() came after the launch, and must not undo it"


# docs/protocol.md#threads
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
