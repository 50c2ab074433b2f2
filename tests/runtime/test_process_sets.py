"""Process sets on real runtimes: overlapping, added and removed while in use, with every collective, and their errors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import MismatchError, PeerLeftError, UnsupportedError
from hvdlite.core.process_set import ProcessSet
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from tests.runtime.programs import process_sets as programs
from tests.worlds import HANGS_SECONDS, Processes, processes, threads


def test_every_collective_on_a_set() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        number = runtime.add_process_set([3, 1, 2]).wait()
        members, ones = (1, 2, 3), np.ones((3, 2), np.float32)
        if rank in members:
            index = members.index(rank)
            out = np.empty_like(ones)
            assert (runtime.allreduce("a", ones * rank, out, ReduceOp.AVERAGE, process_set=number).wait() == 2).all()
            big = np.full(300_000, float(rank))
            assert (runtime.allreduce("b", big, big, ReduceOp.SUM, process_set=number).wait() == 6).all()
            gathered = runtime.allgather("c", np.full((index, 1), rank), process_set=number)
            assert gathered.wait().tolist() == [[2], [3], [3]] and gathered.rows == (0, 1, 2)
            assert (runtime.broadcast("d", ones * rank, 3, process_set=number).wait() == 3).all()
            part = runtime.reducescatter("e", np.arange(8.0), ReduceOp.SUM, process_set=number).wait()
            assert part.tolist() == [[0, 3, 6], [9, 12, 15], [18, 21]][index]
            received, counts = runtime.alltoall("f", np.full((6, 1), rank), [1, 2, 3], process_set=number).wait()
            assert counts.tolist() == [index + 1] * 3 and received.ravel().tolist() == sorted([1, 2, 3] * (index + 1))
            gathered = runtime.gather("g", np.array([rank]), 2, process_set=number).wait()
            assert gathered is None if rank != 2 else gathered.tolist() == [1, 2, 3]
            assert runtime.scatter("h", np.arange(3) * (rank == 1), 1, process_set=number).wait().tolist() == [index]
            result = np.empty(1) if rank == 3 else None
            reduced = runtime.reduce("i", np.array([float(rank)]), result, 3, ReduceOp.MAX, process_set=number).wait()
            assert reduced is None if rank != 3 else reduced == 3
            runtime.barrier("j", process_set=number).wait()
        total = runtime.allreduce("a", np.ones(1), np.empty(1), ReduceOp.SUM).wait()
        assert total == 4
    threads(4, step)


def test_overlapping_sets_at_the_same_time_under_the_same_names() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        sets = [runtime.add_process_set(ranks).wait() for ranks in ([0, 1], [1, 2], [0, 2])]
        assert sets == [1, 2, 3]
        mine = [number for number in (0, *sets) if rank in runtime.members(number)]
        for turn in range(50):
            order = mine[turn % len(mine):] + mine[:turn % len(mine)]
            handles = {number: runtime.allreduce("x", np.full(7, float(rank)), np.empty(7), ReduceOp.SUM, process_set=number)
                       for number in order}
            for number, handle in handles.items():
                assert (handle.wait() == sum(runtime.members(number))).all()
    threads(3, step)


def test_a_removed_set_is_gone_and_its_ranks_can_form_a_new_one() -> None:
    def step(runtime: Runtime) -> None:
        first = runtime.add_process_set([0, 1]).wait()
        with pytest.raises(UnsupportedError, match="are process set 1 already"):
            runtime.add_process_set([1, 0])
        runtime.remove_process_set(first).wait()
        with pytest.raises(UnsupportedError, match="no process set 1"):
            runtime.barrier("x", process_set=first)
        assert runtime.add_process_set([0, 1]).wait() == 2
    threads(3, step)


def test_removing_a_set_ends_what_is_under_way_in_it() -> None:
    def step(runtime: Runtime) -> None:
        number = runtime.add_process_set([0, 2]).wait()
        pending = runtime.barrier("never", process_set=number) if runtime.world.rank == 0 else None
        runtime.remove_process_set(number).wait()
        if pending is not None:
            with pytest.raises(MismatchError, match="removed"):
                pending.wait()
        runtime.barrier("after").wait()
    threads(3, step)


def test_mistakes_are_told() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        for ranks in ([], [0, 0], [0, 9], [-1]):
            with pytest.raises(UnsupportedError, match=r"ranks 0\.\.2"):
                runtime.add_process_set(ranks)
        with pytest.raises(UnsupportedError, match="cannot be removed"):
            runtime.remove_process_set(0)
        with pytest.raises(MismatchError, match=r"rank 0: \[0\]; ranks 1, 2: \[1\]"):
            runtime.add_process_set([min(rank, 1)]).wait()
        number = runtime.add_process_set([0, 2]).wait()
        if rank == 1:
            with pytest.raises(UnsupportedError, match=r"rank 1 is not a member of process set 1, which is ranks \[0, 2\]"):
                runtime.barrier("x", process_set=number)
        else:
            with pytest.raises(UnsupportedError, match="root_rank 1 is not a rank of process set 1"):
                runtime.broadcast("x", np.ones(1), 1, process_set=number)
            with pytest.raises(MismatchError, match="rank 0"):
                runtime.allreduce("x", np.ones(rank + 1), np.empty(rank + 1), ReduceOp.SUM, process_set=number).wait()
            runtime.barrier("x", process_set=number).wait()
        runtime.barrier("end").wait()
    threads(3, step)


def test_a_set_without_the_rank_that_left_goes_on() -> None:
    gone = threading.Event()

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        number = runtime.add_process_set([0, 1]).wait()
        if rank == 2:
            runtime.shutdown()
            gone.set()
            return
        gone.wait()
        with pytest.raises(PeerLeftError, match=r"needs all ranks, but rank 2 left .*Call it on all ranks"):
            runtime.barrier("all").wait()
        for turn in range(5):
            assert runtime.allreduce("x", np.ones(1), np.empty(1), ReduceOp.SUM, process_set=number).wait() == 2, turn
    threads(3, step)


def test_bad_alltoall_and_scalars() -> None:
    def step(runtime: Runtime) -> None:
        cases: list[tuple[Any, str]] = [
            (lambda: runtime.alltoall("x", np.ones(3)), "3 rows cannot be shared equally by 2 ranks"),
            (lambda: runtime.alltoall("x", np.ones(3), [1]), "must be 2 whole numbers"),
            (lambda: runtime.alltoall("x", np.ones(3), [1.5, 1.5]), r"splits \[1.5, 1.5\] must be 2 whole"),
            (lambda: runtime.alltoall("x", np.ones(3), [2, 2]), "at most 3"),
            (lambda: runtime.alltoall("x", np.ones(3), [-1, 1]), "from 0"),
            (lambda: runtime.alltoall("x", np.array(1.0)), "scalar"),
            (lambda: runtime.reducescatter("x", np.array(1.0), ReduceOp.SUM), "scalar"),
            (lambda: runtime.scatter("x", np.array(1.0), 0), "scalar"),
            (lambda: runtime.gather("x", np.ones(1), 5), "root_rank 5 is not a rank of this job"),
        ]
        for call, told in cases:
            with pytest.raises(UnsupportedError, match=told):
                call()
        with pytest.raises(MismatchError, match="after the first dimension"):
            runtime.alltoall("x", np.ones((2, 1 + runtime.world.rank))).wait()
        runtime.barrier("end").wait()
    threads(2, step)


def test_the_class_that_scripts_use() -> None:
    some = ProcessSet([2, 0])
    assert (some.ranks, some.size(), some.rank(), some.included()) == ([0, 2], None, None, None)
    some.register(4, 2)
    assert (some.process_set_id, some.size(), some.rank(), some.included()) == (4, 2, 1, True)
    some.register(4, 1)
    assert some.included() is False
    with pytest.raises(ValueError, match="rank 1 is not a member"):
        some.rank()
    for wrong in ([0, 0], [-1], ["a"], [True]):
        with pytest.raises(ValueError, match="process set"):
            ProcessSet(wrong)  # type: ignore[arg-type]


def test_process_sets_on_processes_through_the_public_interface() -> None:
    processes(4, programs.process_sets_on_processes_through_the_public_interface)


def test_a_rank_that_dies_while_a_set_is_removed_is_named(tmp_path: Path) -> None:
    with Processes(3, programs.a_rank_that_dies_while_a_set_is_removed_is_named, str(tmp_path / "ready")) as world:
        for ended in world.wait(HANGS_SECONDS):
            assert ended.rank == 1 or (ended.code == 0 and "named" in ended.stdout), ended
