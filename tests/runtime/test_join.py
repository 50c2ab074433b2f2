"""Ranks that run out of data before the others: what the others compute without them, and what comes afterwards."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvdlite.core.errors import MismatchError, PeerLeftError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer
from tests.runtime.programs import join as programs
from tests.worlds import HANGS_SECONDS, TORCH, Processes, processes, threads


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_with_fewer_batches_do_not_hold_up_the_others(size: int) -> None:
    def step(runtime: Runtime) -> int:
        rank = runtime.world.rank
        for turn in range(2 * rank):  # rank 0 joins at once, the last one works longest
            active = [each for each in range(size) if turn < 2 * each]
            total = runtime.allreduce(f"x{turn}", np.full(5, float(rank)), np.empty(5), ReduceOp.SUM).wait()
            assert (total == sum(active)).all(), (turn, total)
            mean = runtime.allreduce(f"m{turn}", np.full(5, float(rank)), np.empty(5), ReduceOp.AVERAGE).wait()
            np.testing.assert_allclose(mean, sum(active) / size)
        last: int = runtime.join().wait()
        assert (runtime.allreduce("after", np.ones(3), np.empty(3), ReduceOp.SUM).wait() == size).all()
        return last
    assert threads(size, step) == [size - 1] * size


def test_every_collective_without_a_joined_rank() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        for big in (1, 40_000):
            if rank == 1:
                assert runtime.join().wait() in (0, 2)
                continue
            ones = np.ones((3 * big, 2))
            assert (runtime.allreduce("a", ones, np.empty_like(ones), ReduceOp.PRODUCT).wait() == 1).all()
            gathered = runtime.allgather("b", ones * rank)  # staged when it is big, within the decision when not
            assert gathered.wait().sum() == 2 * 2 * 3 * big and gathered.rows == (3 * big, 0, 3 * big)
            assert (runtime.broadcast("c", ones * rank, 2).wait() == 2).all()
            received, counts = runtime.alltoall("d", ones * rank, [big] * 3).wait()
            assert counts.tolist() == [big, 0, big] and received.sum() == 4 * big
            part = runtime.reducescatter("e", ones, ReduceOp.SUM).wait()
            assert (part == 2).all() and len(part) == big
            gathered = runtime.gather("f", ones[:big], 0).wait()
            assert gathered is None if rank else len(gathered) == 2 * big
            assert (runtime.scatter("g", ones * rank, 2).wait() == 2).all()
            out = np.empty_like(ones) if rank == 2 else None
            runtime.reduce("h", ones, out, 2, ReduceOp.SUM).wait()
            assert out is None or (out == 2).all()
            runtime.barrier("i").wait()
            with pytest.raises(MismatchError, match="root rank 1, which has joined"):
                runtime.broadcast("j", ones, 1).wait()
            with pytest.raises(MismatchError, match="rank 2"):
                runtime.allreduce("k", np.ones(rank + 1), np.empty(rank + 1), ReduceOp.SUM).wait()
            runtime.join().wait()
    threads(3, step, eager_limit=1000)


def test_averages_of_the_active_ranks_only() -> None:
    def step(runtime: Runtime) -> None:
        for size in (3, 100_000):
            if runtime.world.rank > 0:
                value = np.full(size, float(runtime.world.rank))
                assert (runtime.allreduce("x", value, np.empty_like(value), ReduceOp.AVERAGE).wait() == 1.5).all()
            runtime.join().wait()
    threads(3, step, join_divides_by_active=True)


def test_unnamed_calls_match_again_after_a_join() -> None:
    def step(runtime: Runtime) -> None:
        for _ in range(3):
            for _ in range(runtime.world.rank):
                name = runtime.names.unnamed("test", "allreduce")
                runtime.allreduce(name, np.ones(1), np.empty(1), ReduceOp.SUM).wait()
            runtime.join().wait()
    threads(3, step)


def test_process_sets_while_a_rank_has_joined() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        first = runtime.add_process_set([0, 1]).wait()
        if rank != 1:
            second = runtime.add_process_set([0, 2]).wait()
            total = runtime.allreduce("x", np.ones(70_000), np.empty(70_000), ReduceOp.SUM, process_set=second).wait()
            assert (total == 2).all()
        if rank == 0:
            alone = runtime.allreduce("y", np.ones(70_000), np.empty(70_000), ReduceOp.SUM, process_set=first).wait()
            assert (alone == 1).all()
        runtime.join().wait()
        assert runtime.members(2) == (0, 2)
    threads(3, step)


def test_a_rank_that_leaves_ends_a_join() -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank != 1:
            with pytest.raises(PeerLeftError, match=r"ranks? .*\b1\b.* left"):
                runtime.join().wait()
    threads(3, step)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_optimizer_on_uneven_data(size: int) -> None:
    """Buckets are learned, suspended when a rank joins, and used again in the next epoch; weights end equal."""
    pytest.importorskip("torch")
    ended = processes(size, programs.an_optimizer_on_uneven_data, imported=TORCH)
    assert len({rank.result for rank in ended}) == 1


def test_an_optimizer_that_is_made_after_a_join() -> None:
    torch = pytest.importorskip("torch")
    from tests.torch.models import by_bucket

    def step(runtime: Runtime) -> None:
        runtime.join().wait()
        parameter = torch.nn.Parameter(torch.zeros(50))
        optimizer = wrap_optimizer(torch.optim.SGD([parameter], lr=1.0), runtime=runtime)
        seen = []
        for _ in range(5):
            optimizer.zero_grad()
            (parameter * (runtime.world.rank + 1.0)).sum().backward()
            assert (parameter.grad == 1.5).all()
            optimizer.step()
            seen.append(by_bucket(optimizer))
        assert seen == [False, False, True, True, True]
    threads(2, step)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_around_joins(to_none: bool) -> None:
    """Learned buckets are suspended and used again in the same memory, while gradients of before still lie there."""
    torch = pytest.importorskip("torch")
    from tests.torch.models import by_bucket
    size = 3

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        always, sometimes = (torch.nn.Parameter(torch.ones(50)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([always, sometimes], lr=1e-3), runtime=runtime)
        batches = [6, 8, 7]
        for epoch in range(4):
            for batch in range(batches[rank]):
                optimizer.zero_grad(set_to_none=to_none)
                active = [each for each in range(size) if batch < batches[each]]
                using = [each for each in active if (batch + epoch + each) % 3 and (batch + epoch) % 4]
                loss = (always * (rank + 1.0)).sum()
                if rank in using:
                    loss = loss + (sometimes * (rank + 2.0)).sum()
                loss.backward()
                assert torch.allclose(always.grad, torch.tensor(sum(each + 1.0 for each in active) / size))
                if sometimes.grad is not None:
                    assert torch.allclose(sometimes.grad, torch.tensor(sum(each + 2.0 for each in using) / size))
                else:
                    assert not using
                optimizer.step()
                assert by_bucket(optimizer) or batch >= 6 or (epoch == 0 and batch < 2)
            runtime.join().wait()
    threads(size, step)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_while_others_have_joined_is_named(victim: int) -> None:
    with Processes(3, programs.a_rank_that_dies_while_others_have_joined_is_named, victim) as world:
        world.wait_for_all("ready")
        time.sleep(0.3)
        world.kill(victim)
        for ended in world.wait(HANGS_SECONDS):
            assert ended.rank == victim or (ended.code == 0 and "named" in ended.stdout), ended
