"""What scripts do in a scope beside plain loops: wrapped optimizers, loads on one rank, optimizers made outside."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import MirroredStrategy  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.mirroring import (  # noqa: E402
    Net,
    dataset,
    equal_one_process,
    registry_of,
    shards,
    strategy_on,
    weights,
)
from tests.worlds import threads  # noqa: E402

mse = torch.nn.functional.mse_loss


class Ascent(torch.optim.Optimizer):
    """Sharpness-aware minimisation as in davda54/sam, without its first step."""

    def __init__(self, parameters: Any, base: Any, **settings: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    def step(self, closure: Any = None) -> None:
        self.base.step()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


def test_optimizers_around_others_keep_their_groups_and_their_rates() -> None:
    def case(strategy: MirroredStrategy | None, scope: Any) -> list[Any]:
        with scope():
            model = Net()
            optimizer = Ascent(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for index, (x, y) in enumerate(shards(strategy, DataLoader(dataset(37), 8))):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            assert optimizer.param_groups is optimizer.base.param_groups
            if index == 2 and (strategy is None or strategy._replicas.replica_id == 0):
                optimizer.load_state_dict(optimizer.state_dict())
        return weights(model)
    equal_one_process(case)

    def scaled(runtime: Runtime) -> None:
        strategy = strategy_on(runtime, scale_learning_rate=True)
        with strategy.scope():
            optimizer = Ascent(Net().parameters(), torch.optim.SGD, lr=0.1)
            class Around(torch.optim.Optimizer):
                def __init__(self, base: Any) -> None:
                    super().__init__(base.param_groups, base.defaults)
            around = Around(optimizer.base)
        for each in (optimizer, optimizer.base, around):
            assert [group["lr"] for group in each.param_groups] == [0.2] and each.defaults["lr"] == 0.2
    threads(2, scaled)


@pytest.mark.parametrize("loaded", ["the model", "the optimizer", "a copy"])
@pytest.mark.parametrize("loop", ["by hand", "distributed", "run"])
# docs/protocol.md#scopes
def test_rank_0_alone_loads_in_the_middle(loaded: str, loop: str) -> None:
    """Rank 0's values are everybody's from the next step on. (The gradients of that step were computed before.)"""
    def step(runtime: Runtime) -> tuple[list[Any], list[Any], float]:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model, best = Net(), Net(seed=9)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def update(x: Any, y: Any) -> None:
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
        batches = DataLoader(dataset(40), 8)
        for index, batch in enumerate(strategy.distribute(batches) if loop == "distributed" else batches):
            if loop == "run":
                strategy.run(update, batch)
            else:
                update(*batch)
            if runtime.world.rank == 0 and index == 2:
                if loaded == "the model":
                    model.load_state_dict(Net(seed=5).state_dict())
                elif loaded == "a copy":
                    best.load_state_dict(model.state_dict())
                else:
                    state = optimizer.state_dict()
                    state["param_groups"][0]["lr"] = 0.01
                    optimizer.load_state_dict(state)
        return weights(model), weights(best), optimizer.param_groups[0]["lr"]

    first, second = threads(2, step)
    for mine, other in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(mine, other)
    assert first[2] == second[2] == (0.01 if loaded == "the optimizer" else 0.1)


def test_what_could_not_be_mirrored_stays_due() -> None:
    def step(runtime: Runtime) -> None:
        strategy = strategy_on(runtime)
        with strategy.scope():
            layer = torch.nn.Linear(2, 2 + runtime.world.rank)
        if runtime.world.rank == 0:
            layer.load_state_dict(layer.state_dict())
        for _ in range(2):
            with pytest.raises(MismatchError, match="replica 1"):
                strategy.run(lambda: None)
    threads(2, step)


def test_state_keeps_its_dtype() -> None:
    class Wide(torch.optim.SGD):
        """An optimizer with 32-bit state for 16-bit parameters."""

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros(parameter.shape))
                mean.mul_(0.9).add_(parameter.grad.float())
                parameter.data.add_(mean.bfloat16(), alpha=-0.1)

    def step(runtime: Runtime) -> list[Any]:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model = Net(seed=runtime.world.rank).bfloat16()
            optimizer = Wide(model.parameters(), lr=0.1)
        for x, y in strategy.distribute(DataLoader(dataset(32), 8)):
            optimizer.zero_grad()
            mse(model(x.bfloat16()), y.bfloat16()).backward()
            optimizer.step()
        strategy.mirror()
        means = [state["mean"] for state in optimizer.state.values()]
        assert len(means) == 4 and all(mean.dtype is torch.float32 for mean in means)
        assert any(not torch.equal(mean, mean.bfloat16().float()) for mean in means), "it is not rounded either"
        return means
    first, second = threads(2, step)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


def test_what_is_dropped_in_a_scope_is_forgotten() -> None:
    def step(runtime: Runtime) -> None:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model = Net()
            known = len(list(registry_of(strategy)._modules))
            for _ in range(50):
                torch.nn.MSELoss()
                torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
            gc.collect()
            assert (len(list(registry_of(strategy)._modules)), len(list(registry_of(strategy)._optimizers))) == (known, 0)
            assert model is not None
    threads(1, step)


def test_an_optimizer_made_outside_for_a_module_made_inside_is_refused() -> None:
    def step(runtime: Runtime) -> None:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model, other = Net(), Net()
            inside = torch.optim.SGD(model.parameters(), lr=0.1)
        outside = torch.optim.SGD([*other.layers[0].parameters()], lr=0.1)
        with pytest.raises(RuntimeError, match=r"SGD, which was made outside.*trains 'Net1.layers.0.weight'.*inside `with"):
            outside.step()
        elsewhere = torch.nn.Linear(1, 1)
        for fine in (inside, torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(elsewhere.parameters(), lr=0.1),
                     wrap_optimizer(torch.optim.SGD(other.layers[2].parameters(), lr=0.1), runtime=runtime)):
            fine.step()
        del strategy, inside, fine
        with pytest.raises(RuntimeError, match="made outside"):
            outside.step()  # the modules are there still

    def build(runtime: Runtime) -> Any:
        strategy = strategy_on(runtime)
        with strategy.scope():
            return Net()

    def without_strategy(runtime: Runtime) -> None:
        model = build(runtime)
        gc.collect()
        with pytest.raises(RuntimeError, match="made outside"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        copy.deepcopy(model).load_state_dict(model.state_dict())
        pickle.dumps(model)
    gc.collect()
    before = len(optimizer_hooks)
    threads(2, step)
    threads(2, without_strategy)
    gc.collect()
    assert len(optimizer_hooks) == before, "the hook goes with the last module"


def test_an_optimizer_made_outside_is_looked_at_again() -> None:
    def step(runtime: Runtime) -> None:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model, other = Net(), Net()
            inside = torch.optim.SGD(model.parameters(), lr=0.1)
        outside = torch.optim.AdamW(model.parameters(), lr=0.1)
        outside.step()
        del inside
        gc.collect()
        with pytest.raises(RuntimeError, match="AdamW, which was made outside"):
            outside.step()  # nobody reduces the gradients any more
        elsewhere = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        elsewhere.step()
        elsewhere.param_groups[0]["params"] += list(other.parameters())
        with pytest.raises(RuntimeError, match="SGD, which was made outside"):
            elsewhere.step()
    threads(2, step)


def test_a_wrapper_made_outside_around_a_distributed_optimizer() -> None:
    def step(runtime: Runtime) -> list[Any]:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model = Net()

        def base(groups: Any, **settings: Any) -> Any:
            return wrap_optimizer(torch.optim.SGD(groups, **settings), runtime=runtime)
        optimizer = Ascent(model.parameters(), base, lr=0.1)
        for x, y in strategy.distribute(DataLoader(dataset(16), 8)):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
        return weights(model)
    first, second = threads(2, step)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
