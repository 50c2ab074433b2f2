"""What `set_weight` refuses, and ranks that forget it."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError, UnsupportedError  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite.training.gradients.errors import GradientOrderError  # noqa: E402
from hvdlite_torch import comm_hooks  # noqa: E402
from hvdlite_torch.elastic import body_loader  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.mirroring import strategy_on  # noqa: E402
from tests.torch.models import net, weights  # noqa: E402
from tests.worlds import threads  # noqa: E402


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


# docs/protocol.md#weights
@pytest.mark.parametrize("wait_in", ["backward", "step"])
@pytest.mark.parametrize("first", [0, 5], ids=["in the first round", "in a learned bucket"])
@pytest.mark.parametrize("ever", [False, True], ids=["never called", "forgotten once"])
def test_a_rank_that_forgets_it(ever: bool, first: int, wait_in: str) -> None:
    """All ranks get an error that names it, and go on."""
    def step(runtime: Runtime) -> tuple[str, list[Any], list[Any]]:
        rank, model = runtime.world.rank, net()
        optimizer = wrap_optimizer(sgd(model), runtime=runtime, wait_in=wait_in)

        def turn(weight: int | None) -> None:
            optimizer.zero_grad()
            if weight is not None:
                optimizer.set_weight(weight)
            model(torch.full((2, 6), float(rank))).square().mean().backward()
            optimizer.step()
        for _ in range(first):
            turn(rank + 1 if ever else None)
        before = weights(model)
        with pytest.raises(MismatchError) as error:
            turn(None if rank == 1 else 3)
        after = weights(model)
        optimizer.zero_grad()
        turn(2)
        turn(3)
        return str(error.value), [before, after], weights(model)
    results = threads(3, step)
    for rank, (text, (before, after), last) in enumerate(results):
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(last, results[0][2], strict=True))
        assert "set_weight" in text
        if ever and first:
            assert "rank 1 made a backward pass without one" in text and "ranks 0, 2 had weights" in text
            assert ("(rank 1 is this rank)" in text) == (rank == 1)
        else:
            assert "rank 1: Average" in text and "ranks 0, 2: Sum" in text


def test_all_ranks_forget_it() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(sgd(model), runtime=runtime)
        optimizer.set_weight(2)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(MismatchError, match=r"ranks 0, 1 made a backward pass .*; there were weights before"):
            model(torch.ones(2, 6)).sum().backward()
    threads(2, step)


def test_what_is_refused() -> None:
    def step(runtime: Runtime) -> None:
        def made(**options: Any) -> Any:
            return wrap_optimizer(sgd(net()), runtime=runtime, **options)
        for options, reason in [({"op": ReduceOp.SUM}, "needs op=Average, not Sum"),
                                ({"op": ReduceOp.ADASUM}, "needs op=Average, not Adasum"),
                                ({"comm_hook": comm_hooks.PowerSGD()}, "cannot be used with comm_hook")]:
            with pytest.raises(UnsupportedError, match=reason):
                made(**options).set_weight(3)
        optimizer = made()
        for weight in (-1, math.nan, math.inf, "three"):
            with pytest.raises(ValueError, match=f"rank {runtime.world.rank}: the weight .* not {weight!r}"):
                optimizer.set_weight(weight)
        model = net()
        one, other = (wrap_optimizer(sgd(model), runtime=runtime) for _ in range(2))
        with pytest.raises(UnsupportedError, match="of whose parameters another one reduces"):
            one.set_weight(1)
        other.set_weight(1)
        lazy = torch.nn.LazyLinear(3)
        with pytest.raises(UnsupportedError, match="before lazy parameters have got their shapes"):
            wrap_optimizer(sgd(lazy), runtime=runtime).set_weight(1)
    threads(2, step)


def test_a_first_weight_in_the_middle_of_a_step() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(sgd(model), runtime=runtime, backward_passes_per_step=2)
        model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(GradientOrderError, match="comes too late"):
            optimizer.set_weight(3)
        optimizer.zero_grad()
        optimizer.set_weight(3)
    threads(2, step)


def test_a_second_pass_onto_weighted_gradients() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(sgd(model), runtime=runtime)
        for weight in (2, 3):
            optimizer.set_weight(weight)
            if weight == 3:
                with pytest.raises(GradientOrderError, match="backward_passes_per_step"):
                    model(torch.ones(2, 6)).sum().backward()
            else:
                model(torch.ones(2, 6)).sum().backward()
    threads(2, step)


def test_a_warning_once_where_nobody_counts_anything(caplog: pytest.LogCaptureFixture) -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(sgd(model), runtime=runtime)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.set_weight(0)
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        assert not optimizer.state
    with caplog.at_level(logging.WARNING, "hvdlite"):
        threads(2, step)
    assert sum("the weights of all ranks are 0" in record.getMessage() for record in caplog.records) == 1


def test_a_strategy_and_a_loop_that_weigh_ranks_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(runtime: Runtime) -> None:
        strategy = strategy_on(runtime)
        with strategy.scope():
            scoped = sgd(net())
        with pytest.raises(UnsupportedError, match="set_weight is for optimizers outside of a scope"):
            scoped.set_weight(1)
        optimizer = wrap_optimizer(sgd(net()), runtime=runtime)
        monkeypatch.setattr(body_loader.api, "runtime", lambda: runtime)
        weight = body_loader._Weight(SimpleNamespace(_handlers={"": SimpleNamespace(value=optimizer)}))
        weight.set(0.5)
        with pytest.raises(UnsupportedError, match=r"cannot be used in state\.loop"):
            optimizer.set_weight(1)
        weight.end()
        optimizer.set_weight(1)
    threads(1, step)
