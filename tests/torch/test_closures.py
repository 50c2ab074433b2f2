"""`optimizer.step(closure)`: what counts in each call of the closure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite.training.gradients.errors import GradientOrderError  # noqa: E402
from hvdlite_torch import comm_hooks  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import net  # noqa: E402
from tests.torch.one_process import Case, compare  # noqa: E402
from tests.worlds import threads  # noqa: E402

TURNS = 5
"""Two by single gradients, the others in learned buckets."""
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict, "step": lambda: {"wait_in": "step"}, "hook": lambda: {"comm_hook": comm_hooks.AllReduce()}}


def closures(case: Case) -> None:
    """Rank 1's third closure has no backward; gradients are cleared by whatever is there."""
    optimizer = case.optimizer()
    for turn in range(TURNS + 1):
        def closure(turn: int = turn) -> Any:
            (case.model if turn % 2 else optimizer).zero_grad()
            if case.rank == 1 and turn == 2:
                return torch.zeros(())
            loss = case.loss(turn, without=1 if turn == 2 else None)
            loss.backward()
            return loss
        optimizer.step(closure) if turn % 2 else optimizer.step(closure=closure)


def lbfgs(case: Case) -> None:
    """How often it calls the closure depends on the loss."""
    optimizer = case.optimizer(torch.optim.LBFGS(case.model.parameters(), max_iter=8, line_search_fn="strong_wolfe"))
    for turn in range(3):
        def closure(turn: int = turn) -> Any:
            case.model.zero_grad()
            if case.rank == 1 and turn == 1:
                return 0.0
            loss = case.loss(turn, without=1 if turn == 1 else None)
            loss.backward()
            return loss
        returned = optimizer.step(closure)
        assert not getattr(returned, "requires_grad", False) or case.rank is None


class Twice(torch.optim.SGD):  # type: ignore[misc]
    """Calls the closure twice a step, and steps after each call."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(2):
            closure()
            super().step()


def later_calls_without_a_batch(case: Case) -> None:
    """Rank 1's closure does nothing in some steps, or only in their second call: not even clear gradients."""
    optimizer = case.optimizer(Twice(case.model.parameters(), lr=0.1))
    for turn in range(TURNS + 3):
        calls = itertools.count()

        def closure(turn: int = turn, calls: Any = calls) -> None:
            without = turn % 3 == 1 or (turn % 3 == 2 and next(calls) == 1)
            if case.rank != 1 or not without:
                (case.model if turn % 2 else optimizer).zero_grad()
                case.loss(turn, without=1 if without else None).backward()
        optimizer.step(closure)


def lbfgs_where_a_rank_without_a_batch_clears_nothing(case: Case) -> None:
    optimizer = case.optimizer(torch.optim.LBFGS(case.model.parameters(), max_iter=4, line_search_fn="strong_wolfe"))
    for turn in range(4):
        def closure(turn: int = turn) -> Any:
            if case.rank == 1 and turn % 2:
                return torch.zeros(())
            optimizer.zero_grad()
            loss = case.loss(turn, without=1 if turn % 2 else None)
            loss.backward()
            return loss
        optimizer.step(closure)


def later_calls_that_accumulate(case: Case) -> None:
    """In the second one, ranks but 0 use the last layer only."""
    optimizer = case.optimizer(Twice(case.model.parameters(), lr=0.1))
    for turn in range(TURNS):
        calls = itertools.count()

        def closure(turn: int = turn, calls: Any = calls) -> None:
            is_later = next(calls) > 0
            if not is_later:
                optimizer.zero_grad()
            case.loss(turn + 50 * is_later, parts=is_later).backward()
        optimizer.step(closure)


@pytest.mark.parametrize("options", OPTIONS)
def test_closures_end_with_final_gradients_on_every_rank(options: str) -> None:
    compare([closures, lbfgs, later_calls_without_a_batch, lbfgs_where_a_rank_without_a_batch_clears_nothing,
             later_calls_that_accumulate], lambda rank: OPTIONS[options](), tolerance=1e-3)


@pytest.mark.parametrize("turns", [1, 5], ids=["by itself", "in a bucket"])
def test_a_later_call_that_accumulates_on_one_rank_and_does_nothing_on_another_is_an_error_on_both(turns: int) -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(Twice(model.parameters(), lr=0.1), runtime=runtime)
        calls: list[int] = []

        def closure() -> None:
            calls.append(len(calls))
            if calls[-1] % 2 == 0:
                optimizer.zero_grad()
            if calls[-1] % 2 == 0 or calls[-1] < 2 * turns - 1 or runtime.world.rank == 0:
                model(torch.ones(1, 6)).sum().backward()
        for _ in range(turns - 1):
            optimizer.step(closure)
        told = ["accumulated gradients onto those", "neither cleared the gradients"][runtime.world.rank]
        with pytest.raises(GradientOrderError, match=rf"on rank {runtime.world.rank} it {told}.*zero_grad\(\) at the begin"):
            optimizer.step(closure)
        optimizer.step(optimizer.zero_grad)
    threads(2, step)


def test_after_a_later_call_that_raised_rounds_raise_their_own_errors() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(Twice(model.parameters(), lr=0.1), runtime=runtime)
        calls: list[int] = []

        def closure() -> None:
            calls.append(len(calls))
            if len(calls) == 2:
                raise KeyError
            optimizer.zero_grad()
            model(torch.ones(1, 6)).sum().backward()
        with pytest.raises(KeyError):
            optimizer.step(closure)
        optimizer.zero_grad()
        model(torch.ones(1, 6)).sum().backward()
        first, *_, last = model.parameters()
        if runtime.world.rank == 0:
            with pytest.raises(GradientOrderError, match="rank 1 took part without the reduced gradient"):
                model(torch.ones(1, 6)).sum().backward()
        else:
            first.grad = None
            last.sum().backward()
    threads(2, step, bucket_size=0)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_later_call_raises_the_error_of_each_of_its_rounds(passes: int) -> None:
    """Rank 1 alone clears a gradient that rank 0 computes again, in the first of its passes."""
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(Twice(model.parameters(), lr=0.1), runtime=runtime)
        first, *_, last = model.parameters()
        calls: list[int] = []

        def closure() -> None:
            calls.append(len(calls))
            if len(calls) == 1:
                model(torch.ones(1, 6)).sum().backward()
                return
            if runtime.world.rank == 1:
                first.grad = None
            for _ in range(passes):
                (last if runtime.world.rank == 1 else model(torch.ones(1, 6))).sum().backward()
        if runtime.world.rank == 0:
            with pytest.raises(GradientOrderError, match="rank 1 took part without the reduced gradient"):
                optimizer.step(closure)
        else:
            optimizer.step(closure)
    threads(2, step, bucket_size=0)
