"""Uneven batches in a scope equal one process, whichever way gradients are computed and parameters come to be trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import MirroredStrategy, SyncBatchNorm  # noqa: E402
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
UNEVEN = [tuple(tensor for tensor in dataset(rows)[:]) for rows in (8, 7, 5, 3, 8, 1)]


def with_closure(model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)


def with_scaler(model: Any, optimizer: Any, batches: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        scaler.scale(loss * float("inf") if index == 2 else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()


def with_checkpoints(model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        hidden = torch.utils.checkpoint.checkpoint(model.layers[0], x, use_reentrant=False)
        mse(model.layers[2](model.layers[1](hidden)), y).backward()
        optimizer.step()


def with_penalty(model: Any, optimizer: Any, batches: Any) -> None:
    """The gradient of a batch's shard is asked for, and used in a loss."""
    for x, y in batches:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        rows, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (mse(model(x), y) + rows.square().sum(1).mean()).backward()
        optimizer.step()


def with_own_gradients(model: Any, optimizer: Any, batches: Any) -> None:
    """By `torch.autograd.grad`: all of them; together with a backward pass over the others; in place of reduced ones."""
    parameters = list(model.parameters())
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        if index % 3 == 0:
            own = torch.autograd.grad(mse(model(x), y), parameters)
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient
        elif index % 3 == 1:
            parameters[0].grad, = torch.autograd.grad(mse(model(x), y), parameters[:1])
            mse(model(x), y).backward(inputs=parameters[1:])
        else:
            mse(model(x), y).backward()
            for parameter in parameters:
                parameter.grad = parameter.grad * 0.5
        optimizer.step()


def with_two_backward_passes(model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        mse(model(x) * 0.5, y).backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [with_closure, with_scaler, with_checkpoints, with_penalty, with_own_gradients,
                                  with_two_backward_passes])
def test_uneven_batches_in(loop: Callable[[Any, Any, Any], None]) -> None:
    train(loop)


def test_gradients_of_the_script_are_weighted_once_where_ranks_wait_in_the_step() -> None:
    train(with_own_gradients, wait_in="step")


def train(loop: Callable[[Any, Any, Any], None], **config: object) -> None:
    def case(strategy: MirroredStrategy | None, scope: Any) -> list[Any]:
        with scope():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loop(model, optimizer, shards(strategy, UNEVEN))
        return weights(model)
    equal_one_process(case, **config)


def adds_a_group(index: int, model: Any, optimizer: Any) -> None:
    if index == 1:
        optimizer.add_param_group({"params": list(model[2].parameters())})


def thaws(index: int, model: Any, optimizer: Any) -> None:
    if index < 3:
        for parameter in model[2].parameters():
            parameter.requires_grad_(index == 1)
        if index == 0:
            optimizer.add_param_group({"params": list(model[2].parameters())})


@pytest.mark.parametrize("change", [adds_a_group, thaws, None], ids=["add_param_group", "thawed", "lazy"])
def test_parameters_become_trainable_while_a_batch_is_uneven(change: Any) -> None:
    def case(strategy: MirroredStrategy | None, scope: Any) -> list[Any]:
        with scope():
            model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(),
                                        torch.nn.Linear(4, 3) if change else torch.nn.LazyLinear(3))
            trained = model[0] if change else model
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        for index, (x, y) in enumerate(shards(strategy, UNEVEN[1:])):
            if change:
                change(index, model, optimizer)
            optimizer.zero_grad()
            if index == 0:
                with torch.no_grad():
                    model(x)
                    for parameter in model.parameters():
                        parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape))
            mse(model(x), y).backward()
            optimizer.step()
        return weights(model)
    equal_one_process(case)


def test_a_lazy_module_that_is_not_used_mirrors_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(runtime: Runtime) -> None:
        mirrored, index = [], -1
        strategy = strategy_on(runtime, sync_batch_norm=True)
        send = registry_of(strategy)._mirror_tensors  # it has no effect that can be seen, except its cost
        monkeypatch.setattr(registry_of(strategy), "_mirror_tensors", lambda: (mirrored.append(index), send()))
        with strategy.scope():
            model, head, norm = Net(), torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d()
            optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        for index, (x, y) in enumerate(strategy.distribute(UNEVEN[1:2] * 5)):
            optimizer.zero_grad()
            output = model(x)
            (mse(output, y) + (head(output).sum() if index == 3 else 0)).backward()
            optimizer.step()
            if index == 1:
                norm(x)
            if index >= 2:
                assert isinstance(norm, SyncBatchNorm) and strategy.weight != 1
        assert mirrored == [-1, 2, 3]
        gathered = runtime.allgather("head", head.weight.detach().numpy()).wait()
        assert (gathered[:2] == gathered[2:]).all()
    threads(2, step)


def test_a_rank_without_a_batch_joins_in_a_scope() -> None:
    def step(runtime: Runtime) -> list[Any]:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model = Net(seed=runtime.world.rank)
            optimizer = torch.optim.Adam(model.parameters())
        with optimizer.join(model) as joined:
            for x, y in UNEVEN[:2 * runtime.world.rank]:
                optimizer.zero_grad()
                mse(model(x), y).backward()
                optimizer.step()
        assert joined.last_rank == 1
        return weights(model)
    first, second = threads(2, step)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


def test_what_autograd_grad_returns_is_not_weighted() -> None:
    def step(runtime: Runtime) -> None:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model = torch.nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in strategy.distribute([(torch.ones(3, 1),)]):
            gradient, = torch.autograd.grad(model(x).mean(), model.weight)
            with torch.inference_mode():
                assert sum(len(inner) for inner, in strategy.distribute([(torch.ones(5, 1),)])) == (3, 2)[runtime.world.rank]
            assert gradient.item() == 1.0 and strategy.weight == (4 / 3, 2 / 3)[runtime.world.rank]
            optimizer.step()
    threads(2, step)
