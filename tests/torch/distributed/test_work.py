"""Works and futures of process groups; ranks are threads."""

from __future__ import annotations

import datetime
import pickle
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hvdlite.core.errors import HorovodInternalError, MismatchError, OperationTimeoutError
from hvdlite.core.launch_contract import FailureRecord
from hvdlite.runtime.process_hooks import record_failure
from hvdlite_torch.distributed.errors import WaitTimeoutError
from tests.torch.distributed.test_operations import options
from tests.torch.distributed.threads import run

CPU = torch.device("cpu")


def late(group: Any, event: threading.Event) -> Any:
    """Return a work that waits for rank 1, which begins it after the event."""
    if group.rank() == 1:
        event.wait()
    return group.allreduce([torch.ones(2)])


def test_a_work_under_way_and_done() -> None:
    event = threading.Event()

    def step(group: Any) -> None:
        work = late(group, event)
        if group.rank() == 0:
            assert not work.is_completed() and not work.is_success() and work.exception() is None
            with pytest.raises(WaitTimeoutError, match=r"all_reduce\(SUM, float32\[2\]\) is still under way after 0.05 s"):
                work.wait(datetime.timedelta(seconds=0.05))
            event.set()
        assert work.wait() and work.wait() and work.wait(datetime.timedelta(seconds=9))
        assert work.is_completed() and work.is_success() and work.exception() is None
        work.synchronize()
        assert [tensor.tolist() for tensor in work.result()] == [[2.0, 2.0]]

    run(2, step)


def test_futures_and_their_callbacks() -> None:
    event = threading.Event()

    def step(group: Any) -> None:
        work = late(group, event)
        future = work.get_future()
        assert group.rank() == 1 or not (future.done() or work.get_future().done())
        doubled = future.then(lambda done: done.value()[0] * 2)
        event.set()
        assert doubled.wait().tolist() == [4.0, 4.0] and future.wait()[0].tolist() == [2.0, 2.0]
        assert group.allreduce([torch.ones(1)]).get_future().then(lambda done: done.value()).wait()[0].item() == 2.0

    run(2, step)


def test_a_callback_may_communicate_and_wait() -> None:
    """As DDP's PowerSGD hook does."""
    def step(group: Any) -> None:
        def again(future: Any) -> torch.Tensor:
            return group.allreduce([future.value()[0]]).get_future().wait()[0]

        futures = [group.allreduce([torch.full((3,), float(each))]).get_future().then(again) for each in range(4)]
        assert [future.wait().tolist() for future in futures] == [[4.0 * each] * 3 for each in range(4)]

    run(2, step)


def test_a_callback_of_a_future_that_is_asked_for_after_other_calls() -> None:
    """Its collectives come after those, on a rank where its operation is over like on one where it is under way."""
    asked = threading.Event()

    def step(group: Any) -> list[list[float]]:
        if group.rank() == 1:  # an operation is not over before its results are copied
            begin = group._group.start
            group._group.start = lambda operations, finish=None, **more: begin(operations, asked.wait, **more)
        results = [torch.full((2,), 10.0 ** number) for number in range(4)]
        first, second = group.allreduce([results[0]]), group.allreduce([results[1]])
        if group.rank() == 0:
            first.wait()
        assert first.is_completed() == (group.rank() == 0)
        chained = first.get_future().then(lambda done: group.allreduce([results[2]]).wait())
        last = group.allreduce([results[3]])
        asked.set() if group.rank() == 1 else None
        assert chained.wait() and second.wait() and last.wait()
        return [each.tolist() for each in results]

    assert run(2, step) == [[[2.0, 2.0], [20.0, 20.0], [200.0, 200.0], [2000.0, 2000.0]]] * 2


def test_several_operations_as_one_work() -> None:
    event = threading.Event()

    def step(group: Any) -> None:
        one, other, message = torch.ones(1), torch.ones(2), torch.full((1,), float(group.rank()))
        if group.rank() == 1:
            event.wait()
        group._start_coalescing(CPU)
        group.allreduce([one])
        group.send([message], 1, 0) if group.rank() == 0 else group.recv([message], 0, 0)
        group.allreduce([other])
        work = group._end_coalescing(CPU)
        future = work.get_future().then(lambda done: [tensor.tolist() for tensor in done.value()])
        if group.rank() == 0:
            assert not work.is_completed() and not work.is_success() and not future.done()
            event.set()
        assert future.wait() == [[2.0], [0.0], [2.0, 2.0]] and work.wait() and work.is_success()
        group._start_coalescing(CPU)
        group.allreduce([torch.ones(3 + group.rank())])
        group.allreduce([one])
        failed = group._end_coalescing(CPU)
        with pytest.raises(MismatchError):
            failed.wait()
        with pytest.raises(RuntimeError, match="MismatchError"):
            failed.get_future().wait()
        assert one.item() == 4.0 and isinstance(failed.exception(), MismatchError) and not failed.is_success()
        group._start_coalescing(CPU)
        assert group._end_coalescing(CPU).wait()

    run(2, step, messages=True)


def test_a_work_outlives_the_references_of_the_script() -> None:
    event = threading.Event()

    def step(group: Any) -> None:
        tensor = torch.ones(2)
        if group.rank() == 1:
            event.wait()
        reference = weakref.ref(group.allreduce([tensor]))
        assert reference() is None
        event.set()
        group.barrier().wait()
        assert tensor.tolist() == [2.0, 2.0]

    run(2, step)


def test_a_failed_work_raises_at_every_wait() -> None:
    def step(group: Any) -> None:
        mine = torch.ones(2 + group.rank())
        for blocking in (True, False):
            work = group.allreduce([mine], options(dist.AllreduceOptions, asyncOp=not blocking))
            for _ in range(2):
                with pytest.raises(MismatchError) as caught:
                    work.wait()
                assert isinstance(caught.value, dist.DistBackendError)
            assert work.is_completed() and not work.is_success() and isinstance(work.exception(), MismatchError)
            with pytest.raises(RuntimeError, match="all_reduce"):
                work.get_future().wait()

    run(2, step)


def test_a_timeout_names_who_has_not_come() -> None:
    done = threading.Event()

    def step(group: Any) -> None:
        if group.rank() == 1:
            done.wait()
            return
        with pytest.raises(OperationTimeoutError, match=" timeout ") as caught:
            group.barrier(datetime.timedelta(seconds=0.2)).wait()
        assert isinstance(caught.value, dist.DistBackendError) and caught.value.ranks == (1,)
        with pytest.raises(dist.DistBackendError):
            group.allreduce([torch.ones(1)]).wait()
        done.set()

    run(2, step)


def test_a_monitored_barrier_names_who_has_not_come() -> None:
    done = threading.Event()

    def step(group: Any) -> None:
        group.monitored_barrier()
        if group.rank():
            done.wait()
            return
        with pytest.raises(RuntimeError, match="Ranks 1, 2 failed to pass monitoredBarrier in 200 ms"):
            group.monitored_barrier(datetime.timedelta(seconds=0.2), wait_all_ranks=True)
        done.set()

    run(3, step)


def test_a_group_that_is_aborted() -> None:
    event = threading.Event()

    def step(group: Any) -> None:
        if group.rank() == 1:
            event.wait()
            return
        work = group.allreduce([torch.ones(1)])
        group.abort()
        with pytest.raises(HorovodInternalError, match="abort"):
            work.wait()
        with pytest.raises(HorovodInternalError):
            group.allreduce([torch.ones(1)]).wait()
        event.set()

    run(2, step)


def test_a_group_that_is_shut_down_finishes_what_is_under_way() -> None:
    def step(group: Any) -> None:
        value = torch.ones(1)
        work = group.allreduce([value])
        group.shutdown()
        assert work.wait() and value.item() == 2.0
        with pytest.raises(HorovodInternalError, match="destroyed"):
            group.allreduce([torch.ones(1)]).wait()

    run(2, step)


def test_the_end_of_a_group_because_of_an_exception_is_when_the_rank_failed(tmp_path: Path) -> None:
    def step(group: Any) -> None:
        error = KeyError("of the script")
        try:
            raise error
        except KeyError:
            group.shutdown()
        left = time.time()
        record_failure(str(tmp_path), error, 0, 0, "", shown=True)
        record = FailureRecord.read(str(tmp_path), 0)
        assert record is not None and begun <= record.when <= left

    begun = time.time()
    run(1, step)


def test_a_future_of_what_has_failed() -> None:
    def step(group: Any) -> None:
        work = group.allreduce([torch.ones(2 + group.rank())])
        future = work.get_future()
        with pytest.raises(RuntimeError, match="MismatchError"):
            future.then(lambda done: done.value()).wait()
        with pytest.raises(MismatchError) as raised:
            work.wait()
        again = pickle.loads(pickle.dumps(raised.value))  # noqa: S301 - its own
        assert type(again) is type(raised.value) and str(again) == str(raised.value)

    run(2, step)


def test_a_tensor_without_memory() -> None:
    def step(group: Any) -> None:
        with FakeTensorMode():
            fake = torch.ones(3)
        with pytest.raises(ValueError, match="FakeTensor has no memory of its own"):
            group.allreduce([fake])

    run(1, step)


@pytest.mark.parametrize("one_host", [True, False])
def test_ranks_that_differ_get_an_error_with_both_calls(one_host: bool) -> None:
    def step(group: Any) -> str:
        mine = torch.ones(2 + group.rank())
        with pytest.raises(MismatchError) as caught:
            group.allreduce([mine]).wait()
        assert isinstance(caught.value, dist.DistBackendError)
        group.allreduce([torch.ones(1)]).wait()
        return str(caught.value)

    for said in run(2, step, one_host=one_host):
        assert "all_reduce(SUM, float32[2])" in said and "all_reduce(SUM, float32[3])" in said
