"""In which rounds an optimizer takes part: after a join, after a step that was skipped."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite.training.gradients.errors import GradientOrderError  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import by_bucket, net, weights  # noqa: E402
from tests.worlds import threads  # noqa: E402


def test_an_optimizer_that_is_wrapped_after_a_join() -> None:
    """Its first round is one of those since the join; on all ranks, however many rounds they had before."""
    def step(runtime: Runtime) -> list[float]:
        losses = []
        for turn in range(2):
            parameter = torch.nn.Parameter(torch.ones(3))
            optimizer = wrap_optimizer(torch.optim.SGD([parameter], lr=0.1), runtime=runtime)
            with optimizer.join():
                for _ in range(5 + turn if runtime.world.rank == 0 else 6):
                    optimizer.zero_grad()
                    (parameter * (runtime.world.rank + 1)).sum().backward()
                    optimizer.step()
            losses.append(float(parameter.detach()[0]))
        return losses
    (first, second), other = threads(2, step)
    assert [first, second] == other
    assert first == pytest.approx(1 - 5 * 0.15 - 0.1) and second == pytest.approx(1 - 6 * 0.15)


@pytest.mark.parametrize("writes", ["zeros of a frozen part", "clipped zeros"])
def test_zeros_are_no_gradients_of_the_scripts_in_a_join(writes: str) -> None:
    """They would make a second round in each step, to which ranks that have joined cannot contribute."""
    def step(runtime: Runtime) -> list[float]:
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.1), runtime=runtime)
        with optimizer.join():
            for turn in range(4 + 2 * runtime.world.rank):
                if writes == "clipped zeros":
                    optimizer.zero_grad(set_to_none=False)
                else:
                    parameters[0].requires_grad_(turn < 2)
                    for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
                        gradient.zero_()
                sum(parameter.sum() for parameter in parameters[(0 if turn < 2 else 1):]).backward()
                if writes == "clipped zeros":
                    torch.nn.utils.clip_grad_norm_(parameters, 100.0)
                optimizer.step()
        return [parameter[0].item() for parameter in parameters]
    first, second = threads(2, step)
    assert first == second == pytest.approx([1 - 0.2, 1 - 0.4 - 0.1])  # two averages of 1, then two halves


def test_zeros_that_one_rank_writes_are_all_ranks_average() -> None:
    """Else the others' steps would use what was averaged before."""
    def step(runtime: Runtime) -> list[float]:
        kept, used = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([kept, used], lr=0.1), runtime=runtime)
        (kept + used).sum().backward()
        optimizer.step()
        for _ in range(2):
            used.grad = None
            if runtime.world.rank == 0:
                assert kept.grad is not None
                kept.grad.zero_()
            used.sum().backward()
            optimizer.step()
        return kept.tolist()
    assert threads(2, step) == [pytest.approx([0.9, 0.9])] * 2


def test_joins_of_several_optimizers_take_all_parameters_from_the_rank_that_missed_nothing() -> None:
    """Whichever rank comes out of the inner join first."""
    def step(runtime: Runtime) -> list[tuple[Any, ...]]:
        found = []
        a, b, c = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
        one, two, three = (wrap_optimizer(torch.optim.SGD([each], lr=0.1), runtime=runtime) for each in (a, b, c))
        for turn in range(8):
            with one.join() as outer, two.join() as middle, three.join() as inner:
                for _ in range(2 if runtime.world.rank == turn % 2 else 1):
                    for optimizer in (one, two, three):
                        optimizer.zero_grad()
                    (a + b + c).sum().backward()
                    for optimizer in (one, two, three):
                        optimizer.step()
            found.append((outer.last_rank, middle.last_rank, inner.last_rank, *(each.item() for each in (a, b, c))))
        return found
    first, second = threads(2, step)
    assert first == second
    for turn, (*last, a, b, c) in enumerate(first):
        assert last == [turn % 2] * 3
        assert a == b == c == pytest.approx(1 - 0.15 * (turn + 1), abs=1e-5)


@pytest.mark.parametrize("wait_in", ["backward", "step"])
@pytest.mark.parametrize("owned", [1, 2])
def test_a_closure_that_clears_by_hand_what_only_one_rank_computes(owned: int, wait_in: str) -> None:
    """Neither rank has the gradient that was reduced before, so nothing is missing in the next reduction."""
    def train(rank: int, wrap: Any) -> list[torch.Tensor]:
        a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.full((3,), 2.0))
        parameters = [b, a][:owned]
        optimizer = wrap(torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))

        def closure() -> Any:
            a.grad = b.grad = None
            losses = (a ** 2).sum(), (b ** 2).sum()
            loss = losses[0] + losses[1] / 2 if rank < 0 else losses[0] + losses[1] if rank == 0 else losses[0]
            loss.backward()
            return loss
        for _ in range(5):
            optimizer.step(closure)
        return [parameter.detach() for parameter in parameters]

    ranks = threads(2, lambda runtime: train(
        runtime.world.rank, lambda optimizer: wrap_optimizer(optimizer, runtime=runtime, wait_in=wait_in)))
    for each in ranks:
        torch.testing.assert_close(each, train(-1, lambda optimizer: optimizer))


@pytest.mark.parametrize("wait_in", ["backward", "step"])
@pytest.mark.parametrize("cleared", [True, False])
def test_a_rank_without_a_backward_after_a_step_that_was_skipped(wait_in: str, cleared: bool) -> None:
    """Zeroed gradients begin anew: the rank takes part in the next round although it has had one since the last step."""
    def step(runtime: Runtime) -> list[torch.Tensor]:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, wait_in=wait_in)
        for turn in range(9):
            optimizer.zero_grad(set_to_none=cleared)
            if turn % 3 != 1 or runtime.world.rank == 0:
                (model(torch.ones(4, 6)).square().mean() * (turn + 1)).backward()
            optimizer.synchronize()
            if turn % 3:
                optimizer.step()
        return weights(model)
    first, second = threads(2, step)
    assert all(map(torch.equal, first, second))
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in (1, 2, 4, 5, 7, 8):
        plain.zero_grad()
        (model(torch.ones(4, 6)).square().mean() * (turn + 1) / (2 if turn % 3 == 1 else 1)).backward()
        plain.step()
    for one, alone in zip(first, weights(model), strict=True):
        torch.testing.assert_close(one, alone)


@pytest.mark.parametrize("zeroed", [True, False])
def test_sparse_gradients_of_a_single_row_and_of_none(zeroed: bool) -> None:
    """Zeroed ones have no rows."""
    def step(runtime: Runtime) -> list[torch.Tensor]:
        table = torch.nn.Embedding.from_pretrained(torch.ones(5, 3), freeze=False, sparse=True)
        optimizer = wrap_optimizer(torch.optim.SGD(table.parameters(), lr=0.5), runtime=runtime)
        for turn in range(4):
            if turn != 3:
                optimizer.zero_grad(set_to_none=not zeroed)
            if runtime.world.rank == turn or turn == 3:
                table(torch.tensor([2])).sum().backward()
            else:
                table(torch.tensor([], dtype=torch.int64)).sum().backward()
            optimizer.step()
        return table.weight.detach()
    for weight in threads(2, step):
        assert weight[:, 0].tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("learned", [True, False])
def test_a_reduced_gradient_that_nobody_cleared_is_not_reduced_again(learned: bool) -> None:
    """In a bucket as alone: neither where all ranks lack it, nor where another rank adds to it."""
    def step(runtime: Runtime) -> list[float]:
        first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([first, second], lr=0.0), runtime=runtime)
        for _ in range(6 if learned else 1):
            optimizer.zero_grad()
            ((first + second) * (runtime.world.rank + 1)).sum().backward()
            optimizer.step()
        assert by_bucket(optimizer) == learned
        optimizer.step()
        own = first if runtime.world.rank == 0 else second
        (own * 8).sum().backward()
        optimizer.step()
        return [float(parameter.grad[0]) for parameter in (first, second)]
    assert threads(2, step) == [[(1.5 + 8) / 2] * 2] * 2


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_gradients_of_which_each_pass_computes_some_are_final_when_they_are_read(wait_in: str) -> None:
    def step(runtime: Runtime) -> list[float]:
        first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([first, second], lr=0.0), runtime=runtime, wait_in=wait_in,
                                   backward_passes_per_step=2)
        (first * runtime.world.rank).sum().backward()
        (second * (runtime.world.rank + 2)).sum().backward()
        read = [float(parameter.grad[0]) for parameter in (first, second)]
        optimizer.step()
        return read
    assert threads(2, step) == [[0.5, 2.5]] * 2


def test_two_backward_passes_where_the_wait_for_the_first_was_deferred() -> None:
    """The second one's gradients belong to a round of their own, which begins when the first is over."""
    def step(runtime: Runtime) -> list[torch.Tensor]:
        first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([first, second], lr=1.0), runtime=runtime)
        for turn in range(6):
            optimizer.zero_grad()
            if turn == 0:
                if runtime.world.rank == 1:
                    runtime.barrier("early").wait()
                first.sum().backward()
                if runtime.world.rank == 0:  # rank 0's wait in backward() is deferred, then and from now on
                    runtime.barrier("early").wait()
            else:
                first.sum().backward()
                (second * (runtime.world.rank + 1)).sum().backward()
            optimizer.step()
        return [first.detach(), second.detach()]
    for found in threads(2, step):
        torch.testing.assert_close(found, [torch.full((3,), -6.0), torch.full((3,), -7.5)])


def test_a_step_that_calls_its_base_classs_counts_once() -> None:
    """torch runs hooks twice then, on the ranks where a plain optimizer of the base class has been made."""
    class Outer(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def step(runtime: Runtime) -> list[torch.Tensor]:
        model = net()
        kind = Outer if runtime.world.rank else torch.optim.Adam
        optimizer = wrap_optimizer(kind(model.parameters(), lr=0.01), runtime=runtime)
        for number in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 6), float(number + runtime.world.rank))).square().mean().backward()
            optimizer.step()
        return weights(model)
    torch.optim.Adam(net().parameters())
    one, other = threads(2, step)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("failing", [0, 3])
def test_a_rank_whose_reduction_fails_makes_the_rounds_that_are_due(failing: int, passes: int) -> None:
    """The other rank, where nothing has failed, makes them too."""
    def step(runtime: Runtime) -> list[float]:
        rank, losses = runtime.world.rank, []
        p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([p, q], lr=0.1), runtime=runtime, wait_in="step",
                                   backward_passes_per_step=passes)

        def computed(loss: Any) -> None:
            (loss * (rank + 1)).sum().backward()
        for turn in range(6):
            optimizer.zero_grad()
            computed(p + q)
            if turn == failing:
                optimizer.synchronize()
                with pytest.raises(GradientOrderError, match="took part without the reduced gradient") if rank == 0 else \
                        contextlib.nullcontext():
                    q.grad = None if rank else q.grad
                    for _ in range(1 + passes):
                        computed(p if rank else p + q)
                    optimizer.synchronize()
            else:
                optimizer.step()
                losses.append(p.grad[0].item())
        return losses
    assert threads(2, step) == [[1.5] * 5] * 2
