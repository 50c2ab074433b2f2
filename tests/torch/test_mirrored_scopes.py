"""Scopes of `MirroredStrategy`: what they patch, what they leave behind, and several things made in one."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.optimizer import is_distributed  # noqa: E402
from tests.torch.mirroring import (  # noqa: E402
    OPTIMIZERS,
    Net,
    assert_close,
    dataset,
    registry_of,
    strategy_on,
    train,
    weights,
)
from tests.worlds import threads  # noqa: E402


def patched() -> bool:
    return hasattr(torch.optim.Optimizer.__init__, "__wrapped__") or hasattr(torch.nn.Module.__init__, "__wrapped__")


def test_a_scope_leaves_nothing_behind() -> None:
    def step(runtime: Runtime) -> None:
        originals = vars(torch.optim.Optimizer)["__init__"], vars(torch.nn.Module)["__init__"]
        strategy, other = strategy_on(runtime), strategy_on(runtime)
        with pytest.raises(KeyError), strategy.scope():
            kept = torch.optim.SGD(Net().parameters(), lr=0.1)
            with strategy.scope() as again:
                assert again is strategy and patched()
            assert is_distributed(torch.optim.SGD(Net().parameters(), lr=0.1))
            with pytest.raises(RuntimeError, match="another MirroredStrategy"), other.scope():
                pass
            with pytest.raises(ValueError, match="learning rate"):
                torch.optim.SGD(Net().parameters(), lr=-1.0)
            with pytest.raises(ValueError, match="LBFGS"):  # after the base class's part
                torch.optim.LBFGS([{"params": [part]} for part in Net().parameters()])
            raise KeyError("the script's own")
        assert (vars(torch.optim.Optimizer)["__init__"], vars(torch.nn.Module)["__init__"]) == originals
        assert is_distributed(kept), "what was made is whole"
        assert not is_distributed(torch.optim.SGD(Net().parameters(), lr=0.1))
        with other.scope():
            assert is_distributed(torch.optim.SGD(Net().parameters(), lr=0.1))
        assert not patched()
    threads(1, step)


def test_somebody_elses_patch_survives_ours() -> None:
    def step(runtime: Runtime) -> None:
        original = torch.nn.Module.__init__
        strategy = strategy_on(runtime)
        calls = []
        try:
            with strategy.scope():
                ours = torch.nn.Module.__init__

                def theirs(self: Any, *arguments: Any, **named: Any) -> None:
                    calls.append(type(self))
                    ours(self, *arguments, **named)
                torch.nn.Module.__init__ = theirs
            assert torch.nn.Module.__init__ is theirs
            with strategy.scope():
                known = len(list(registry_of(strategy)._modules))
                module = torch.nn.Linear(1, 1)
                assert len(list(registry_of(strategy)._modules)) == known + 1, "it is remembered once"
            assert torch.nn.Module.__init__ is theirs
            torch.nn.Linear(1, 1)
            assert len(list(registry_of(strategy)._modules)) == known + 1 and calls == [torch.nn.Linear] * 2
            del module
        finally:
            torch.nn.Module.__init__ = original
    threads(1, step)


def test_two_threads_with_a_scope_each_and_one_without() -> None:
    """Ranks are threads here already; each of them trains two models on two more threads."""
    def step(runtime: Runtime) -> None:
        strategies = [strategy_on(runtime) for _ in range(2)]
        meeting = threading.Barrier(3, timeout=30)
        models: dict[int, Any] = {}
        failures: list[BaseException] = []

        def body(number: int) -> None:
            try:
                strategy = strategies[number]
                with strategy.scope():
                    meeting.wait()
                    models[number] = Net(seed=10 * number + runtime.world.rank)
                    optimizer = OPTIMIZERS["sgd"](models[number].parameters())
                    meeting.wait()
                    train(models[number], optimizer, strategy.distribute(DataLoader(dataset(), 16)), 2, clip=False)
                meeting.wait()
            except BaseException as error:
                failures.append(error)
                meeting.abort()
        workers = [threading.Thread(target=body, args=(number,)) for number in range(2)]
        for worker in workers:
            worker.start()
        meeting.wait()
        assert not is_distributed(torch.optim.SGD(Net().parameters(), lr=0.1)), "this thread is in no scope"
        with pytest.raises(RuntimeError, match=r"thread 'Thread-.*' is inside"), strategies[0].scope():
            pass
        meeting.wait()
        meeting.wait()
        for worker in workers:
            worker.join(30)
        assert not failures, failures
        for number, model in models.items():
            alone = Net(seed=10 * number)
            train(alone, OPTIMIZERS["sgd"](alone.parameters()), DataLoader(dataset(), 16), 2, clip=False)
            assert_close(weights(model), weights(alone))
    threads(2, step)
    assert not patched()


class Made:
    """An optimizer and a scheduler that a library makes."""

    def __init__(self, model: Any) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=20)


def test_two_models_several_optimizers_and_schedulers_in_one_scope() -> None:
    def step(runtime: Runtime | None) -> list[list[Any]]:
        strategy = strategy_on(runtime) if runtime is not None else None
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            first, second = Net(1), Net(2)
            made = Made(first)
            halves = [torch.optim.SGD(second.layers[0].parameters(), lr=0.1, momentum=0.9),
                      torch.optim.Adam(second.layers[2].parameters(), lr=0.01)]
            halving = torch.optim.lr_scheduler.StepLR(halves[0], 2, 0.5)
        if strategy is not None:
            assert all(is_distributed(optimizer) for optimizer in (made.optimizer, *halves))
            assert made.optimizer._settings.names[first.layers[0].weight] == "layers.0.weight"
        loader: Any = DataLoader(dataset(37), 8)
        for x, y in loader if strategy is None else strategy.distribute(loader):
            for optimizer in (made.optimizer, *halves):
                optimizer.zero_grad()
            torch.nn.functional.mse_loss(first(x) + second(x), y).backward()
            for optimizer in (made.optimizer, *halves):
                optimizer.step()
            made.scheduler.step()
            halving.step()
        return [weights(first), weights(second)]
    expected = step(None)
    for ours in threads(2, step):
        for mine, theirs in zip(ours, expected, strict=True):
            assert_close(mine, theirs)


class Sharpness(torch.optim.Optimizer):
    """An optimizer around another one for the same parameters, as sharpness-aware minimisation is written."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **settings: Any) -> None:
        super().__init__(parameters, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.cat([each.grad.reshape(-1) for group in self.param_groups for each in group["params"]]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["climbed"] = parameter.grad * (0.05 / norm)
                parameter.add_(self.state[parameter]["climbed"])
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.state[parameter].pop("climbed"))
        self.base.step()
        self.zero_grad()


def test_several_optimizers_with_the_same_parameters_reduce_once() -> None:
    def sharpness(runtime: Runtime | None) -> list[Any]:
        strategy = strategy_on(runtime) if runtime is not None else None
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = Net()
            optimizer = Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader: Any = DataLoader(dataset(37), 8)
        for x, y in loader if strategy is None else strategy.distribute(loader):
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.climb()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            assert optimizer.base.param_groups is optimizer.param_groups, "mirroring loads into what there is"
        return weights(model)

    def stages(runtime: Runtime | None) -> list[Any]:
        """The second optimizer takes over, while something still holds on to the first."""
        strategy = strategy_on(runtime) if runtime is not None else None
        model: Any = None
        held = []
        for stage in range(2):
            with strategy.scope() if strategy is not None else contextlib.nullcontext():
                model = Net() if model is None else model
                optimizer = torch.optim.SGD(model.parameters() if stage else model.layers[0].parameters(), lr=0.1)
            held.append(optimizer)
            loader: Any = DataLoader(dataset(37), 8)
            for x, y in loader if strategy is None else strategy.distribute(loader):
                optimizer.zero_grad(set_to_none=False)
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return weights(model)

    for function in (sharpness, stages):
        expected = function(None)
        for ours in threads(2, function):
            assert_close(ours, expected)


def test_an_optimizer_synchronizes_gradients_that_another_one_reduces_for_it() -> None:
    def step(runtime: Runtime) -> None:
        with strategy_on(runtime).scope():
            model = Net()
            first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        for optimizer in (second, first):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(runtime.world.rank))
            optimizer.synchronize()
            assert all(torch.equal(parameter.grad, torch.full_like(parameter, 0.5)) for parameter in model.parameters())
            optimizer.zero_grad()
    threads(2, step)
