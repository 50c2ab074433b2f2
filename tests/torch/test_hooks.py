"""Hooks of the user's own beside the optimizer's, and two optimizers of the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import by_bucket  # noqa: E402
from tests.worlds import threads  # noqa: E402

STEPS = 9
LATER = 5
"""The step from which on there is one more hook; the set is learned by then."""


class Hooks:
    """What a user may register on parameters: a record of local norms, clipping, and from `LATER` on a rescaling."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())
        self.norms: list[float] = []

    def register(self, step: int) -> None:
        for parameter in self.parameters:
            if step == 0:
                parameter.register_post_accumulate_grad_hook(self.record)
                parameter.register_post_accumulate_grad_hook(self.clip)
            if step == LATER:
                parameter.register_post_accumulate_grad_hook(self.replace)

    def record(self, parameter: Any) -> None:
        self.norms.append(parameter.grad.norm().item())

    def clip(self, parameter: Any) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    def replace(self, parameter: Any) -> None:
        parameter.grad = parameter.grad * 3


def model_and_batch(rank: int) -> tuple[Any, Any]:
    """Return a model with a gradient that is copied at once (64 KB) and one that waits for its bucket, and a batch."""
    generator = torch.Generator().manual_seed(7)
    model = torch.nn.Linear(128, 128)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model, torch.randn(4, 128, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("wait_in", ["backward", "step"])
# docs/protocol.md#user-hooks
def test_the_users_hooks_see_and_change_this_ranks_gradient_as_under_ddp(wait_in: str, to_none: bool) -> None:
    """Whenever they are registered: before a step, and when the gradients' places are learned."""
    def step(runtime: Runtime) -> tuple[list[float], list[Any]]:
        model, x = model_and_batch(runtime.world.rank)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), runtime=runtime, wait_in=wait_in)
        hooks = Hooks(model)
        for turn in range(STEPS):
            optimizer.zero_grad(set_to_none=to_none)
            hooks.register(turn)
            model(x).square().mean().backward()
            optimizer.step()
        assert by_bucket(optimizer)
        return hooks.norms, [parameter.detach() for parameter in model.parameters()]
    ranks = threads(2, step)

    models = [model_and_batch(rank) for rank in range(2)]
    hooked = [Hooks(model) for model, _ in models]
    for turn in range(STEPS):
        for (model, x), hooks in zip(models, hooked, strict=True):
            model.zero_grad()
            hooks.register(turn)
            model(x).square().mean().backward()
        for pair in zip(*(model.parameters() for model, _ in models), strict=True):
            mean = (pair[0].grad + pair[1].grad) / 2
            with torch.no_grad():
                for parameter in pair:
                    parameter -= mean
    for (norms, weights), hooks, (model, _) in zip(ranks, hooked, models, strict=True):
        torch.testing.assert_close(sorted(norms), sorted(hooks.norms))
        torch.testing.assert_close(weights, list(model.parameters()))


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_a_hook_sees_what_several_passes_have_accumulated(wait_in: str) -> None:
    """It halves the sum, in the second pass too, and reads another parameter's gradient, which came a moment before."""
    def train(rank: float, wrap: Any) -> list[Any]:
        first, second, third = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
        seen = []

        def halve(parameter: Any) -> None:
            parameter.grad.mul_(0.5)

        def look(parameter: Any) -> None:
            seen.append(second.grad is not None)
        optimizer = wrap(torch.optim.SGD([first, second, third], lr=1.0))
        first.register_post_accumulate_grad_hook(halve)
        third.register_post_accumulate_grad_hook(look)
        for turn in range(5):
            optimizer.zero_grad()
            for number in (turn + 1.0, 10.0):
                ((first + third) * number * (rank + 1) + (second ** 2 + second) * number).sum().backward()
            (second * (rank + 1)).sum().backward()
            optimizer.step()
        assert len(seen) == 10
        return [parameter.detach() for parameter in (first, second, third)]

    ranks = threads(2, lambda runtime: train(runtime.world.rank, lambda optimizer: wrap_optimizer(
        optimizer, runtime=runtime, wait_in=wait_in)))
    for each in ranks:
        torch.testing.assert_close(each, train(0.5, lambda optimizer: optimizer))


def test_a_hook_that_takes_the_gradient_away_leaves_none_to_reduce() -> None:
    def step(runtime: Runtime) -> list[float]:
        first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([first, second], lr=1.0), runtime=runtime)

        def take(parameter: Any) -> None:
            parameter.grad = None
        if runtime.world.rank == 0:
            first.register_post_accumulate_grad_hook(take)
        for _ in range(5):
            optimizer.zero_grad()
            (first + second).sum().backward()
            optimizer.step()
        return [first[0].item(), second[0].item()]
    assert threads(2, step) == [[1 - 5 * 0.5, 1 - 5 * 1.0]] * 2


STORIES: dict[str, str] = {
    # What is called in each step; letters are optimizers, in the order in which they are wrapped.
    "only the last is used": "zm zb B sb",
    "only the first is used": "za B sa",
    "only the first is used, and the model is cleared": "B sa zm",
    "one after the other": "za B sa zb B sb",
    "both use one gradient": "za zb B sa sb",
    "both use one gradient, in the other order": "zb za B sb sa",
    "the last one goes": "zm B sa gb",
}


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM])
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("tied", [False, True], ids=["all shared", "one shared"])
@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_two_living_optimizers_of_the_same_parameters(wait_in: str, tied: bool, story: str, op: ReduceOp) -> None:
    def train(model: Any, optimizers: dict[str, Any], loss: Callable[[], Any]) -> list[Any]:
        for _ in range(7):
            for what, *which in STORIES[story].split():
                match what:
                    case "B":
                        loss().backward()
                    case "g":
                        optimizers.pop(which[0], None)
                    case "z":
                        optimizers.get(which[0], model).zero_grad()
                    case "s":
                        optimizers[which[0]].step()
        return [parameter.detach() for parameter in model.parameters()]

    def made(model: Any) -> dict[str, Any]:
        first, second = list(model.parameters()), [model.bias] if tied else list(model.parameters())
        return {"a": torch.optim.SGD(first, lr=0.5), "b": torch.optim.SGD(second, lr=0.25, momentum=0.5)}

    def step(runtime: Runtime) -> list[Any]:
        model, x = model_and_batch(runtime.world.rank)
        optimizers = {name: wrap_optimizer(each, op=op, wait_in=wait_in, runtime=runtime)
                      for name, each in made(model).items()}
        return train(model, optimizers, lambda: model(x).square().mean())
    first, second = threads(2, step)
    assert all(map(torch.equal, first, second))

    model, batches = model_and_batch(0)[0], [model_and_batch(rank)[1] for rank in range(2)]
    scale = 0.5 if op is ReduceOp.AVERAGE else 1.0
    alone = train(model, made(model), lambda: sum(model(x).square().mean() for x in batches) * scale)
    for one, other in zip(first, alone, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("how", "op"), [("passes", ReduceOp.AVERAGE), ("written", ReduceOp.AVERAGE),
                                         ("no_sync", ReduceOp.AVERAGE), ("no_sync", ReduceOp.SUM)])
def test_a_second_optimizer_reduces_what_was_added_to_a_tensor_of_the_first_ones(how: str, op: ReduceOp) -> None:
    """Gradients are zeroed in place, so the tensors stay those of the first optimizer's reduction."""
    def train(model: Any, first: Any, second: Any, loss: Callable[[int], Any]) -> list[Any]:
        for turn in range(4):
            model.zero_grad(set_to_none=False)
            if how == "written":
                gradients = torch.autograd.grad(loss(turn), list(model.parameters()))
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    if parameter.grad is None:
                        parameter.grad = gradient
                    else:
                        parameter.grad.copy_(gradient)
            elif how == "no_sync" and hasattr(second, "no_sync"):
                with second.no_sync():
                    loss(turn).backward()
            else:
                loss(turn).backward()
            first.step()
            model.zero_grad(set_to_none=False)
            for part in range(2 if how == "passes" else 1):
                loss(turn + 10 * part).backward()
            second.step()
        return [parameter.detach() for parameter in model.parameters()]

    def step(runtime: Runtime) -> list[Any]:
        model, x = model_and_batch(runtime.world.rank)
        first = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), op=op, runtime=runtime)
        second = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.25), op=op, runtime=runtime,
                                backward_passes_per_step=2 if how == "passes" else 1)
        return train(model, first, second, lambda turn: (model(x) - turn).square().mean())
    one, other = threads(2, step)
    assert all(map(torch.equal, one, other))

    model, batches = model_and_batch(0)[0], [model_and_batch(rank)[1] for rank in range(2)]
    scale = 0.5 if op is ReduceOp.AVERAGE else 1.0
    alone = train(model, *(torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25)),
                  lambda turn: sum((model(x) - turn).square().mean() for x in batches) * scale)
    for got, wanted in zip(one, alone, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("keeps", [False, True])
def test_an_optimizer_of_an_earlier_phase_hands_nothing_over_on_any_rank(keeps: bool) -> None:
    """Although the script keeps it on one rank, or the garbage collector finds it on one rank only."""
    def step(runtime: Runtime) -> list[Any]:
        model, x = model_and_batch(runtime.world.rank)
        model = torch.nn.Sequential(model, torch.nn.Linear(128, 3, bias=False))
        torch.nn.init.constant_(model[1].weight, 0.01)
        kept: list[Any] = []

        def phase(parameters: Any) -> None:
            optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.01), runtime=runtime)
            torch.optim.lr_scheduler.StepLR(optimizer, 1)  # a cycle, which only the garbage collector frees
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            if (runtime.world.rank == 0) == keeps:
                kept.append(optimizer)
        phase(model.parameters())
        if not keeps:
            kept.clear()
        phase(model[1].parameters())
        if keeps and runtime.world.rank == 0:
            assert len(kept) == 2
        return [parameter.detach() for parameter in model.parameters()]
    one, other = threads(2, step)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM])
def test_an_optimizer_is_used_again_after_another_one_of_its_parameters_was_wrapped(op: ReduceOp) -> None:
    """It reduces its other parameters, and shared ones once, also without zero_grad()."""
    def train(model: Any, wrap: Callable[[Any], Any], loss: Callable[[], Any]) -> list[Any]:
        first = wrap(torch.optim.SGD(model.parameters(), lr=0.5))
        for turn in range(4):
            loss().backward()
            first.step()
            model.zero_grad()
            if turn == 1:
                second = wrap(torch.optim.SGD([model.bias], lr=0.25))
                for _ in range(2):
                    loss().backward()
                    second.step()
                    model.zero_grad()
                loss().backward()
                second.step()
                first.step()
                model.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    def step(runtime: Runtime) -> list[Any]:
        model, x = model_and_batch(runtime.world.rank)
        return train(model, lambda plain: wrap_optimizer(plain, op=op, runtime=runtime),
                     lambda: model(x).square().mean())
    one, other = threads(2, step)
    assert all(map(torch.equal, one, other))
    model, batches = model_and_batch(0)[0], [model_and_batch(rank)[1] for rank in range(2)]
    scale = 0.5 if op is ReduceOp.AVERAGE else 1.0
    alone = train(model, lambda plain: plain, lambda: sum(model(x).square().mean() for x in batches) * scale)
    for got, wanted in zip(one, alone, strict=True):
        torch.testing.assert_close(got, wanted)
