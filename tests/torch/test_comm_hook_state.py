"""What PowerSGD keeps from step to step: errors that come later, at another loss scale, in a checkpoint."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import comm_hooks  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import losses, net, weights  # noqa: E402
from tests.worlds import threads  # noqa: E402


def powersgd(**more: Any) -> Any:
    return comm_hooks.PowerSGD(1, **{"start_iter": 1, "min_compression_rate": 0.0, **more})


class Alone(comm_hooks.Exchange):
    """An exchange with nobody."""

    size, rank, joins = 1, 0, 0

    def __init__(self) -> None:
        self.parameters = ()

    def start_average(self, name: str, tensors: Any) -> Callable[[], None]:
        return lambda: None

    def largest(self, name: str, tensor: Any) -> Any:
        return tensor


def test_what_is_lost_comes_later() -> None:
    hook, gradient = powersgd(start_iter=0), torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
    total, steps = torch.zeros_like(gradient), 400
    for _ in range(steps):
        sent = gradient.clone()
        hook.reduce([("w", sent)], Alone())
        total += sent
    torch.testing.assert_close(total / steps, gradient, rtol=0.1, atol=0.1)


def test_gradients_of_zeros_do_not_end_the_power_iteration() -> None:
    """LoRA begins with them; the row of a padding index stays zero."""
    hook, gradient = powersgd(start_iter=0), torch.ones(4, 3)
    gradient[0] = 0
    for sent in (torch.zeros(4, 3), torch.zeros(4, 3), gradient.clone()):
        hook.reduce([("w", sent)], Alone())
    torch.testing.assert_close(sent, gradient)


def test_small_gradients_that_are_compressed_together_are_as_if_alone() -> None:
    """Among them one of another shape, one in another memory order, one of zeros and one that is missing at times."""
    shapes = [(6, 4), (6, 4), (4, 6), (6, 2, 2), (6, 4), (6, 4), (6, 4)]

    def make() -> Any:
        return comm_hooks.PowerSGD(2, start_iter=0, min_compression_rate=0.0)
    together, alone = make(), [make() for _ in shapes]
    generator = torch.Generator().manual_seed(5)
    for step in range(6):
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        values[4] = torch.randn(4, 6, generator=generator).t()
        values[5].zero_()
        given = [(f"w{index}", value) for index, value in enumerate(values) if step % 2 or index != 6]
        expected = [(name, value.clone()) for name, value in given]
        together.reduce(given, Alone())
        for (name, value), hook in zip(expected, alone, strict=False):
            hook.load_state_dict({**hook.state_dict(), "steps": step})  # by which first factors are drawn
            hook.reduce([(name, value)], Alone())
        for (_, one), (_, other) in zip(given, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for kind in ("errors", "factors"):
        for name, value in together.state_dict()[kind].items():
            assert value.untyped_storage().nbytes() == value.nbytes
            torch.testing.assert_close(value, alone[int(name[1:])].state_dict()[kind][name], rtol=1e-4, atol=1e-5)


class Scaled:
    """A loss scale that changes from step to step, by powers of two: what is computed keeps its bits."""

    def __init__(self, scales: list[float]) -> None:
        self._scales = iter(scales)
        self.now = 1.0

    def next(self) -> float:
        self.now = next(self._scales)
        return self.now

    def __call__(self) -> float:
        return self.now


def test_errors_follow_the_loss_scale() -> None:
    def step(runtime: Runtime) -> list[Any]:
        found = []
        for scales in ([1.0] * 6, [1024.0, 1024.0, 2.0, 0.5, 64.0, 64.0]):
            scale = Scaled(scales)
            model = net()
            optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime,
                                       comm_hook=powersgd(loss_scale=scale))
            for loss in losses(runtime, model, optimizer, range(6)):
                (loss * scale.next()).backward()
                for parameter in model.parameters():
                    parameter.grad.div_(scale.now)
                optimizer.step()
            found.append(weights(model))
        return found
    for plain, scaled in threads(2, step):
        for mine, theirs in zip(plain, scaled, strict=True):
            assert torch.equal(mine, theirs)


def test_training_goes_on_after_an_infinity() -> None:
    """A step with an infinity on one rank is skipped on all, and leaves no trace but a smaller scale."""
    def step(runtime: Runtime) -> list[Any]:
        found = []
        for has_infinity in (False, True):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            hook = powersgd(loss_scale=scaler.get_scale)
            model = net()
            optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, comm_hook=hook)
            for turn, loss in enumerate(losses(runtime, model, optimizer, range(8))):
                is_bad = turn == 4
                if is_bad and not has_infinity:
                    continue
                before = hook.state_dict()
                scaler.scale(loss * (torch.inf if is_bad and runtime.world.rank else 1.0)).backward()
                finite = [bool(parameter.grad.isfinite().all()) for parameter in model.parameters()]
                assert all(finite) == (not is_bad), (turn, finite)
                if is_bad:
                    for name, error in before["errors"].items():
                        assert torch.equal(error, hook.state_dict()["errors"][name])
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == (4.0 if has_infinity else 8.0)
            found.append(weights(model))
        return found
    for without, with_infinity in threads(2, step):
        for mine, theirs in zip(without, with_infinity, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_lose_what_their_rounding_loses(dtype: Any) -> None:
    """In 16 bits the sum of all steps is right to the rounding of one; in 64 bits nothing is rounded to 32."""
    gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(4)).to(dtype)
    hook, steps = comm_hooks.PowerSGD(3, start_iter=0, min_compression_rate=0.0), 60
    total = torch.zeros(8, 6, dtype=torch.float64)
    for _ in range(steps):
        sent = gradient.clone()
        hook.reduce([("w", sent)], Alone())
        total += sent
    torch.testing.assert_close(total / steps, gradient.double(), rtol=0.06, atol=0.06)
    if dtype is torch.float64:
        sent = gradient.clone()
        comm_hooks.PowerSGD(6, start_iter=0, min_compression_rate=0.0).reduce([("w", sent)], Alone())
        torch.testing.assert_close(sent, gradient, rtol=1e-14, atol=1e-14)


def test_models_of_every_dtype_train() -> None:
    def step(runtime: Runtime) -> None:
        for dtype in (torch.float16, torch.bfloat16):
            for make in (powersgd, comm_hooks.AllReduce):
                model = net().to(dtype)
                optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime,
                                           comm_hook=make())
                for loss in losses(runtime, model, optimizer, range(4)):
                    loss.backward()
                    optimizer.step()
                assert all(parameter.isfinite().all() for parameter in model.parameters())
    threads(2, step)


@pytest.mark.parametrize("make", [powersgd, comm_hooks.AllReduce])
def test_complex_gradients_keep_both_parts(make: Callable[[], Any]) -> None:
    def step(runtime: Runtime) -> None:
        weight = torch.nn.Parameter(torch.ones(3, 5, dtype=torch.complex64))
        optimizer = wrap_optimizer(torch.optim.SGD([weight], lr=0.1), runtime=runtime, comm_hook=make())
        for _ in range(4):
            optimizer.zero_grad()
            (weight * (1 + 2j * (1 + runtime.world.rank))).imag.sum().backward()
            torch.testing.assert_close(weight.grad, torch.full((3, 5), 3 + 1j))
    threads(2, step)


def test_errors_belong_to_their_parameter() -> None:
    """Of two that have gradients in turns, in one bucket of torch's hook."""
    def step(runtime: Runtime) -> None:
        generator, turns = torch.Generator().manual_seed(4), 200
        targets = torch.randn(2, 8, 6, generator=generator)
        own = targets + (runtime.world.rank - 0.5) * torch.randn(8, 6, generator=generator)
        parameters = [torch.nn.Parameter(torch.zeros(8, 6)) for _ in range(2)]
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=1 / turns), comm_hook=powersgd(start_iter=0),
                                   runtime=runtime)
        for turn in range(2 * turns):
            optimizer.zero_grad()
            (parameters[turn % 2] * own[turn % 2]).sum().backward()
            assert parameters[1 - turn % 2].grad is None
            optimizer.step()
        for parameter, target in zip(parameters, targets, strict=True):
            torch.testing.assert_close(-parameter.data, target, rtol=0.1, atol=0.1)
    threads(2, step)


def test_a_checkpoint_carries_the_hook() -> None:
    def step(runtime: Runtime) -> None:
        def made(state: Any = None, hook_state: Any = None) -> Any:
            model, hook = net(), powersgd()
            optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime, comm_hook=hook)
            if state is not None:
                model.load_state_dict(state)
                hook.load_state_dict(hook_state)
            return model, optimizer, hook

        def trained(job: Any, steps: range) -> list[Any]:
            model, optimizer, _ = job
            for loss in losses(runtime, model, optimizer, steps):
                loss.backward()
                optimizer.step()
            return weights(model)
        first = made()
        trained(first, range(4))
        file = io.BytesIO()
        torch.save([first[0].state_dict(), first[2].state_dict()], file)
        expected = trained(first, range(4, 8))
        file.seek(0)
        model_state, hook_state = torch.load(file, weights_only=True)
        for mine, theirs in zip(trained(made(model_state, hook_state), range(4, 8)), expected, strict=True):
            assert torch.equal(mine, theirs)
        # Another rank's errors are not taken over, and ranks may disagree about the number of steps.
        other = made(model_state, {**hook_state, "rank": 1, "steps": 1000 * runtime.world.rank})
        trained(other, range(4, 5))
        errors = other[2].state_dict()["errors"]
        assert errors
        one = next(iter(errors.values()))
        assert one.abs().sum() > 0
    threads(2, step)
