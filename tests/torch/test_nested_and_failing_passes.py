"""Backward passes that are nested in others, and backward passes that fail."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.gradients import runs  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.one_process import Case, compare  # noqa: E402
from tests.worlds import threads  # noqa: E402

TURNS = 5
"""Two by single gradients, the others in learned buckets."""


def reentrant(model: Any, x: Any) -> Any:
    return checkpoint(model, x.requires_grad_(), use_reentrant=True)


def all_parameters_in_reentrant_checkpoints(case: Case) -> None:
    """With a closure, and clipped without one."""
    optimizer = case.optimizer()
    for turn in range(2 * TURNS):
        def closure(turn: int = turn) -> Any:
            optimizer.zero_grad()
            loss = case.loss(turn, lambda x: reentrant(case.model[2], reentrant(case.model[:2], x)))
            loss.backward()
            return loss
        if turn % 2:
            optimizer.step(closure)
        else:
            closure()
            torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
            optimizer.step()


def layers_in_several_reentrant_checkpoints(case: Case) -> None:
    """Nested ones too, beside a layer in none; two backward passes a step."""
    layer = torch.nn.Linear(6, 6)
    torch.nn.init.constant_(layer.weight, 0.1)
    torch.nn.init.zeros_(layer.bias)
    optimizer = case.optimizer(torch.optim.SGD([*case.model.parameters(), *layer.parameters()], lr=0.1))
    for turn in range(TURNS):
        optimizer.zero_grad()
        for part in range(1 + turn % 2):
            case.loss(turn + 50 * part, lambda x: case.model[2](reentrant(
                lambda y: case.model[:2](reentrant(layer, reentrant(layer, y))), x))).backward()
        optimizer.step()


def a_layer_in_a_reentrant_checkpoint_and_outside_of_it(case: Case) -> None:
    """Outside before, or after; gradients are read after the backward pass."""
    layer = torch.nn.Linear(6, 6)
    torch.nn.init.constant_(layer.weight, 0.1)
    torch.nn.init.zeros_(layer.bias)
    optimizer = case.optimizer(torch.optim.SGD([*case.model.parameters(), *layer.parameters()], lr=0.1))
    for turn in range(2 * TURNS):
        optimizer.zero_grad()
        if turn % 2:
            case.loss(turn, lambda x: case.model(layer(reentrant(layer, x)))).backward()
        else:
            case.loss(turn, lambda x: case.model(reentrant(layer, layer(x)))).backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
        optimizer.step()


def a_backward_pass_in_a_hook(case: Case) -> None:
    optimizer = case.optimizer()
    for turn in range(TURNS):
        optimizer.zero_grad()
        outer = torch.ones(2, requires_grad=True).sum()

        def inner(_: Any, turn: int = turn) -> None:
            with torch.enable_grad():
                case.loss(turn).backward()
        outer.register_hook(inner)
        outer.backward()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
        optimizer.step()


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_reentrant_checkpoints(wait_in: str) -> None:
    compare([all_parameters_in_reentrant_checkpoints, layers_in_several_reentrant_checkpoints,
             a_layer_in_a_reentrant_checkpoint_and_outside_of_it, a_backward_pass_in_a_hook,
             two_optimizers_by_different_checkpoints_of_one_pass],
            lambda rank: {"wait_in": wait_in})


class Failing(torch.autograd.Function):
    """Returns what it is given, and fails in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise ValueError("out of memory")


def fail(case: Case, turn: int, *, nested: bool) -> None:
    """Compute gradients of the last layer, and no others; nested: of all layers, in a checkpoint."""
    def failing(x: Any) -> Any:
        x = x.requires_grad_()
        return reentrant(case.model, Failing.apply(x)) if nested else case.model[2](Failing.apply(case.model[:2](x)))
    with pytest.raises(ValueError, match="out of memory"):
        case.loss(turn, failing).backward()


def passes_that_fail_and_are_repeated(case: Case) -> None:
    """In each turn gradients are cleared in another way, by single gradients and in buckets."""
    optimizer = case.optimizer()
    for turn in range(12):
        optimizer.zero_grad()
        if turn != 3:
            fail(case, turn, nested=turn % 4 > 1)
        if turn % 3 == 0:
            optimizer.zero_grad()
        elif turn % 3 == 1:
            case.model.zero_grad()
        else:
            for parameter in case.model.parameters():
                parameter.grad = None
        case.loss(turn + 50).backward()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
        optimizer.step()


def a_pass_that_fails_and_counts(case: Case) -> None:
    """What it has computed is in the last layer's gradient. In one process, all ranks' share of it."""
    optimizer = case.optimizer()
    for turn in range(TURNS):
        optimizer.zero_grad()
        if case.rank is None:
            case.loss(turn, lambda x: case.model[2](case.model[:2](x).detach())).backward()
        else:
            fail(case, turn, nested=False)
        case.loss(turn + 50).backward()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
        optimizer.step()


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_backward_passes_that_fail_and_are_repeated(wait_in: str) -> None:
    compare([passes_that_fail_and_are_repeated, a_pass_that_fails_and_counts], lambda rank: {"wait_in": wait_in})


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_all_optimizers_of_a_backward_pass_that_fails_are_guarded(wait_in: str) -> None:
    def interrupt(_: Any) -> None:
        raise ValueError("interrupted")

    def step(runtime: Runtime) -> Any:
        layers = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        for parameter in (*layers[0].parameters(), *layers[1].parameters()):
            torch.nn.init.ones_(parameter)
        optimizers = [wrap_optimizer(torch.optim.SGD(layer.parameters(), lr=0.0), runtime=runtime, wait_in=wait_in)
                      for layer in layers]
        for turn in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = layers[1](layers[0](torch.full((1, 3), 1.0 + runtime.world.rank))).sum()
            if turn < 3:
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
            else:
                layers[0].weight.register_hook(interrupt)
                with pytest.raises(ValueError, match="interrupted"):
                    loss.backward()
        return layers[1].weight.grad
    first, second = threads(2, step)
    assert torch.equal(first, second)
    assert torch.equal(first, torch.full((3, 3), (4.0 + 7.0) / 2))


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_gradients_are_guarded_when_what_another_library_does_at_the_end_of_the_pass_fails(wait_in: str) -> None:
    """Between the end of the pass and the wait for it."""
    def fail_at_the_end() -> None:
        raise ValueError("of another library")

    def step(runtime: Runtime) -> Any:
        layer = torch.nn.Linear(3, 1)
        optimizer = wrap_optimizer(torch.optim.SGD(layer.parameters(), lr=0.0), runtime=runtime, wait_in=wait_in)
        engine = torch.autograd.Variable._execution_engine
        for _ in range(TURNS):
            optimizer.zero_grad()
            hooks = [parameter.register_post_accumulate_grad_hook(lambda _: engine.queue_callback(fail_at_the_end))
                     for parameter in layer.parameters()]
            with pytest.raises(ValueError, match="of another library"):
                layer(torch.full((1, 3), 1.0 + runtime.world.rank)).sum().backward()
            assert torch.equal(layer.weight.grad, torch.full((1, 3), 1.5))
            for hook in hooks:
                hook.remove()
            optimizer.step()
    threads(2, step)


def test_one_optimizer_that_fails_guards_another_whose_gradients_come_on_another_thread(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """As with gradients on a GPU."""
    number, asked, guarded = 1 << 40, [], []
    monkeypatch.setattr(runs, "_at_end", asked.append)

    class Hooks:
        run: Any = None

        def run_is_awaited(self) -> None:
            assert self.run.is_awaited

        def end_pass(self) -> bool:
            raise ValueError("failed")

        def guard(self) -> None:
            guarded.append(self)
        fail_pass = guard
    one, other = Hooks(), Hooks()

    def take_part(hooks: Hooks) -> None:
        runs.outermost(number, hooks.run).add(hooks)
    take_part(one)
    thread = threading.Thread(target=take_part, args=(other,))
    thread.start()
    thread.join()
    assert one.run is other.run and asked == [one.run], "one run, whose end is asked for once"
    with pytest.raises(ValueError, match="failed"):
        asked[0].end()
    assert {*guarded} == {one, other}


def two_optimizers_by_different_checkpoints_of_one_pass(case: Case) -> None:
    """In one after the other, in changing order; the second layer is also used outside of them."""
    layers = [torch.nn.Linear(6, 6) for _ in range(2)]
    for layer in layers:
        torch.nn.init.constant_(layer.weight, 0.1)
        torch.nn.init.zeros_(layer.bias)
    modules = layers[0], torch.nn.Sequential(layers[1], case.model)
    optimizers = [case.optimizer(torch.optim.SGD(module.parameters(), lr=0.1)) for module in modules]
    for turn in range(3 * TURNS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, second = (layers[0], layers[1]) if turn % 2 else (layers[1], layers[0])

        def forward(x: Any, first: Any = first, second: Any = second, turn: int = turn) -> Any:
            inputs = x.requires_grad_().clone(), x.clone()  # autograd comes to both checkpoints before it comes to these
            parts = reentrant(first, inputs[0]) + reentrant(second, inputs[1]) + layers[1](x)
            return reentrant(case.model, parts) if turn % 3 else case.model(parts)
        case.loss(turn, forward).backward()
        torch.nn.utils.clip_grad_norm_([*layers[0].parameters(), *layers[1].parameters()], 0.1)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_a_pass_that_fails_on_some_ranks_only_after_a_gradient_makes_no_round_of_its_own(wait_in: str) -> None:
    """The pass that follows is over other layers, and ends the round that the failed one began."""
    def step(runtime: Runtime) -> None:
        first, second = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        optimizer = wrap_optimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1),
                                   runtime=runtime, wait_in=wait_in)
        for turn in range(TURNS):
            optimizer.zero_grad()
            (first(torch.ones(1, 3)) + second(torch.ones(1, 3))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            output = first(Failing.apply(torch.ones(1, 3, requires_grad=True)))
            with pytest.raises(ValueError, match="out of memory"):
                (output if runtime.world.rank == 0 else Failing.apply(output)).sum().backward()
            (second(torch.full((1, 3), 1.0 + runtime.world.rank + turn))).sum().backward()
            assert second.bias.grad.item() == 1.0 and second.weight.grad[0, 0].item() == turn + 1.5
            optimizer.step()
    threads(2, step)
