"""Real runtimes on ranks as threads: the semantics of the calls, agreement errors, leaving and failing."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import tempfile
import threading
import time
from typing import Any

import numpy as np
import pytest

from hvdlite.core.config import Config
from hvdlite.core.errors import (
    DuplicateNameError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    PeerLeftError,
    UnsupportedError,
)
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.group_state import GroupState
from hvdlite.memory.area import Area, area_bytes
from hvdlite.negotiation.messages import GroupCalls
from hvdlite.planes.base import Plane
from hvdlite.runtime.runtime import Runtime
from tests.rank_threads import assemble_threads
from tests.worlds import HANGS_SECONDS, threads


def summed(runtime: Runtime, name: str, array: Any) -> Any:
    return runtime.allreduce(name, array, np.empty_like(array), ReduceOp.SUM).wait()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_in_flight_at_once(size: int) -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        order = list(range(40))
        np.random.default_rng(rank).shuffle(order)  # another order on every rank
        handles = {index: runtime.allreduce(f"t{index}", np.full(index, rank, np.int32), np.empty(index, np.int32),
                                            ReduceOp.SUM) for index in order}
        gathered = runtime.allgather("g", np.full((rank + 1, 2), rank, np.int8))
        sent = runtime.broadcast("b", np.array([rank]), size - 1)
        barrier = runtime.barrier("z")
        for index, handle in handles.items():
            assert handle.wait().tolist() == [sum(range(size))] * index  # type: ignore[union-attr]
            assert handle.contributors == tuple(range(size)) and handle.done()
        assert gathered.wait().tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]  # type: ignore[union-attr]
        assert gathered.rows == tuple(range(1, size + 1))
        assert sent.wait() == size - 1
        assert barrier.wait() is None
    threads(size, step)


def test_shapes_survive_and_a_scalar_is_fine() -> None:
    def step(runtime: Runtime) -> None:
        assert summed(runtime, "scalar", np.array(2.0)).shape == ()
        assert summed(runtime, "cube", np.ones((2, 3, 4))).shape == (2, 3, 4)
        assert summed(runtime, "empty", np.ones((0, 3))).shape == (0, 3)
    threads(2, step)


@pytest.mark.parametrize(("change", "both"), [
    ({"array": np.zeros(3, np.float32)}, ["[2]", "[3]"]),
    ({"array": np.zeros(2, np.float64)}, ["float32", "float64"]),
    ({"op": ReduceOp.MAX}, ["Sum", "Max"]),
    ({"prescale": 0.5}, ["1.0", "0.5"]),
])
def test_a_mismatch_raises_everywhere_and_the_job_goes_on(change: dict[str, Any], both: list[str]) -> None:
    def step(runtime: Runtime) -> None:
        given = {"array": np.zeros(2, np.float32), "op": ReduceOp.SUM, "prescale": 1.0}
        if runtime.world.rank == 1:
            given |= change
        array, op = given.pop("array"), given.pop("op")
        with pytest.raises(MismatchError) as caught:
            runtime.allreduce("x", array, np.empty_like(array), op, **given).wait()
        assert "'x'" in str(caught.value) and "ranks 0, 2" in str(caught.value) and "rank 1" in str(caught.value)
        assert all(value in str(caught.value) for value in both)
        assert summed(runtime, "x", np.ones(2)).tolist() == [3.0, 3.0]
    threads(3, step)


def test_an_absent_rank_counts_as_zeros() -> None:
    def step(runtime: Runtime) -> None:
        mine = None if runtime.world.rank == 0 else np.full(3, 6.0)
        handle = runtime.allreduce("x", mine, np.zeros(3), ReduceOp.AVERAGE)
        assert handle.wait().tolist() == [4.0] * 3 and handle.contributors == (1, 2)  # type: ignore[union-attr]
        nobody = runtime.allreduce("y", None, np.full(3, 9.0), ReduceOp.AVERAGE)
        assert nobody.wait().tolist() == [9.0] * 3 and nobody.contributors == ()  # type: ignore[union-attr]
    threads(3, step)


def test_a_name_in_flight_is_refused_at_the_call_and_free_afterwards() -> None:
    first_made = threading.Barrier(2)

    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 0:
            first = runtime.allreduce("x", np.ones(1), np.empty(1), ReduceOp.SUM)
            with pytest.raises(DuplicateNameError, match="'x'"):
                runtime.allreduce("x", np.ones(1), np.empty(1), ReduceOp.SUM)
            first_made.wait()
            assert first.wait() == 2
        else:
            first_made.wait()
            assert summed(runtime, "x", np.ones(1)) == 2
        for _ in range(200):  # a name is free as soon as its handle is done
            assert summed(runtime, "x", np.ones(1)) == 2
    threads(2, step)


def test_bad_arguments_raise_at_the_call_and_lose_nothing() -> None:
    def step(runtime: Runtime) -> None:
        ones = np.ones((4, 4))
        for call, told in (
            (lambda: runtime.allreduce("x", ones.T[:2], np.empty((2, 4)), ReduceOp.SUM), "not C-contiguous"),
            (lambda: runtime.allreduce("x", ones, np.empty(3), ReduceOp.SUM), "must be equal"),
            (lambda: runtime.allreduce("x", np.ones(3, int), np.ones(3, int), ReduceOp.ADASUM), "floating point"),
            (lambda: runtime.reducescatter("x", ones, ReduceOp.ADASUM), "no Adasum"),
            (lambda: runtime.allreduce("x", np.array(["a"]), np.array(["a"]), ReduceOp.SUM), "not supported"),
            (lambda: runtime.allreduce("x", np.array([True]), np.array([True]), ReduceOp.SUM), "bool has no Sum"),
            (lambda: runtime.allreduce("x", np.array([1j]), np.array([1j]), ReduceOp.MIN), "no order"),
            (lambda: runtime.allgather("x", np.array(1.0)), "scalar"),
            (lambda: runtime.broadcast("x", ones, 2), "root_rank 2"),
            (lambda: runtime.broadcast("x", ones, -1), "root_rank -1"),
        ):
            with pytest.raises(UnsupportedError, match=re.escape(told)):
                call()
        assert summed(runtime, "x", np.ones(1)) == 2
    threads(2, step)


def test_a_failing_rank_is_named_with_its_traceback_everywhere() -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 1:
            runtime.fail("ValueError", "boom", "Traceback: here it happened")
            return
        with pytest.raises(PeerFailedError, match="rank 1 failed with ValueError: boom") as caught:
            summed(runtime, "x", np.ones(1))
        assert caught.value.rank == 1 and "here it happened" in str(caught.value)
        with pytest.raises(PeerFailedError):
            summed(runtime, "y", np.ones(1))
    threads(3, step)


class WatchedGroup(GroupState):
    """Writes down what it is asked."""

    def __init__(self, asked: list[str]) -> None:
        super().__init__("group", (0,), Area(bytearray(area_bytes(1)), 0, 1))
        self.asked = asked
        self.on_report = functools.partial(asked.append, "on_report")

    def calls(self) -> GroupCalls:
        self.asked.append("calls")
        return super().calls()

    def fail(self, error: Exception) -> None:
        assert self.error is not None and not self.has_runtime
        self.asked.append("fail")


def test_who_watches_several_groups_is_told_once() -> None:
    """When a report is gathered, and before the groups fail."""
    def step(runtime: Runtime) -> None:
        asked: list[str] = []
        first, second = WatchedGroup(asked), WatchedGroup(asked)
        second.on_report = first.on_report
        runtime.add_group(first)
        runtime.add_group(second)
        summed(runtime, "x", np.ones(1))
        if runtime.world.rank == 0:
            reported = threading.Event()
            runtime.demand_report(lambda report: reported.set())
            assert reported.wait(HANGS_SECONDS)
            runtime.fail("ValueError", "boom", "")
        with pytest.raises(HorovodInternalError):
            summed(runtime, "y", np.ones(1))
        runtime.shutdown()
        assert asked[0] == "on_report" and ("on_report", "on_report") not in itertools.pairwise(asked)
        assert asked[-3:] == ["on_report", "fail", "fail"]
    threads(2, step)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_work_that_needs_a_rank_that_left_fails_naming_it(leaver: int) -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == leaver:
            return  # shuts down; rank 0 serves until the others have left as well
        with pytest.raises(PeerLeftError, match=rf"ranks? .*\b{leaver}\b.* left"):  # others may have left since
            summed(runtime, "x", np.ones(1))
        with pytest.raises(PeerLeftError):
            summed(runtime, "y", np.ones(1))
    threads(3, step)


def test_shutdown_fails_pending_handles_and_later_calls() -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 0:
            handle = runtime.allreduce("never", np.ones(1), np.empty(1), ReduceOp.SUM)
            runtime.shutdown()
            with pytest.raises(HorovodInternalError, match=r"shut down|left"):
                handle.wait()
            with pytest.raises(NotInitializedError):
                runtime.barrier("z")
    threads(2, step)


def test_a_handle_can_time_out_and_still_complete() -> None:
    timed_out = threading.Event()

    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 0:
            handle = runtime.barrier("z")
            with pytest.raises(TimeoutError, match="'z'"):
                handle.wait(0.01)
            timed_out.set()
            handle.wait()
        else:
            timed_out.wait()
            runtime.barrier("z").wait()
    threads(2, step)


def test_a_stall_is_told_with_the_missing_rank(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    watch = caplog.handler.emit
    caplog.handler.emit = lambda record: (watch(record), "stall" in record.getMessage() and told.set())  # type: ignore

    def step(runtime: Runtime) -> None:
        runtime.barrier("first").wait()
        if runtime.world.rank == 1:
            assert told.wait(HANGS_SECONDS), "no stall was reported"
        runtime.barrier("late").wait()
    threads(2, step, stall_check_time_seconds=0.05)
    assert "'late'" in caplog.text and "not yet by ranks [1]" in caplog.text
    assert "rank 1 never enqueued 'late': it is in step(), test_threads.py:" in caplog.text
    assert "its last collectives: first" in caplog.text


def test_a_stall_report_says_what_a_missing_rank_waits_for_instead(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    watch = caplog.handler.emit
    wanted = {"rank 0 never enqueued 'y': it waits for 'x' in step()",
              "rank 1 never enqueued 'x': it waits for 'y' in step()"}  # and "alike: rank 2"

    def emit(record: logging.LogRecord) -> None:  # both may be in one report, or in two
        watch(record)
        wanted.difference_update([text for text in wanted if text in record.getMessage()])
        if not wanted:
            told.set()

    caplog.handler.emit = emit  # type: ignore[method-assign]

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        first, second = ("x", "y") if rank == 0 else ("y", "x")
        handle = runtime.barrier(first)
        assert told.wait(HANGS_SECONDS), f"never told: {wanted}"
        runtime.barrier(second).wait()
        handle.wait()
    threads(3, step, stall_check_time_seconds=0.05)


def test_two_user_threads_of_one_rank() -> None:
    def step(runtime: Runtime) -> None:
        def work(prefix: str) -> None:
            for turn in range(100):
                assert summed(runtime, f"{prefix}{turn}", np.ones(10)).tolist() == [2.0] * 10
        workers = [threading.Thread(target=work, args=(prefix,)) for prefix in "ab"]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    threads(2, step)


class FailsToClose:
    """A plane whose `close` raises, as a library may."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def close(self) -> None:
        raise OSError("the library cannot be closed")


@pytest.mark.parametrize("ends", ["fail", "shutdown"])
def test_a_plane_that_cannot_be_closed_leaves_nobody_waiting(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    """Handles fail, calls raise, and the other parts are closed."""
    runtime, other = assemble_threads(2, Config(shutdown_timeout=10.0), wrap=lambda rank, plane: FailsToClose(plane))
    with tempfile.TemporaryDirectory() as directory:
        runtime.serve_reports(directory)
        runtime.start()
        other.start()
        pending = runtime.allreduce("x", np.ones(3), np.ones(3), ReduceOp.SUM)
        if ends == "fail":
            runtime.fail("ValueError", "the script fails", "")
        leaving = threading.Thread(target=other.shutdown)
        leaving.start()
        runtime.shutdown()
        leaving.join(HANGS_SECONDS)
        assert not os.listdir(directory), "the report server is open"
    with pytest.raises(HorovodInternalError):
        pending.wait()
    with pytest.raises(HorovodInternalError):
        runtime.allreduce("y", np.ones(3), np.ones(3), ReduceOp.SUM).wait()
    assert "the library cannot be closed" in caplog.text


class HangsWhenClosed(FailsToClose):
    """A plane whose `close` does not end until it may, as a library may hang."""

    may_end = threading.Event()

    def close(self) -> None:
        self.may_end.wait(HANGS_SECONDS)


def test_shutdown_that_gives_up_on_a_plane_logs_where_it_hangs(caplog: pytest.LogCaptureFixture) -> None:
    runtime, = assemble_threads(1, Config(shutdown_timeout=0.2), wrap=lambda rank, plane: HangsWhenClosed(plane))
    runtime.start()
    leaving = threading.Thread(target=runtime.shutdown)
    leaving.start()
    while "gave up waiting in shutdown()" not in caplog.text and leaving.is_alive():
        time.sleep(0.01)
    HangsWhenClosed.may_end.set()
    leaving.join(HANGS_SECONDS)
    assert "in close" in caplog.text and "self.may_end.wait" in caplog.text
