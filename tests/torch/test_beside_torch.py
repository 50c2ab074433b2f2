"""What users combine the optimizer with: uneven data, torch.compile, the profiler, autocast, LBFGS, schedulers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import DistributedOptimizer  # noqa: E402
from tests.torch.test_optimizer import OPTIMIZERS, batches, net, share, train, weights  # noqa: E402
from tests.worlds import processes, threads  # noqa: E402


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_with_fewer_batches_join_and_end_up_equal(kind: str) -> None:
    def step(runtime: Runtime) -> list[Any]:
        model = net()
        optimizer = DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), _runtime=runtime)
        data = list(batches(3 + 4 * runtime.world.rank, 1))
        for _ in range(2):  # epochs
            with optimizer.join():
                for x, y in data:
                    train(optimizer, model, x, y)
        train(optimizer, model, *data[0])
        return weights(model)
    found = threads(3, step)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert torch.equal(mine, theirs)


def test_compiled_models_and_steps_train_like_plain_ones() -> None:
    processes(2, """
        import torch, hvdlite_torch as hvd
        hvd.init()
        torch.set_num_threads(1)
        def run(compiles):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
            optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
            forward = torch.compile(model, backend="aot_eager") if compiles else model
            torch.manual_seed(hvd.rank() + 1)
            for _ in range(6):
                optimizer.zero_grad()
                forward(torch.randn(8, 6)).square().mean().backward()
                optimizer.step()
            return [parameter.detach().clone() for parameter in model.parameters()]
        for mine, theirs in zip(run(True), run(False)):
            torch.testing.assert_close(mine, theirs)
    """, timeout=120)


def test_the_profiler_shows_where_gradients_are_waited_for() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), _runtime=runtime)
        data = list(batches(2, 2))
        if runtime.world.rank == 0:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                for x, y in data:
                    train(optimizer, model, share(x, runtime), share(y, runtime))
            assert any(event.key == "hvdlite.wait_for_gradients" and event.count == 2 for event in profile.key_averages())
        else:
            for x, y in data:
                train(optimizer, model, share(x, runtime), share(y, runtime))
    threads(2, step)


def test_lbfgs_steps_with_reduced_gradients() -> None:
    x, y = next(batches(1, 2))

    def fit(optimizer: Any, model: Any, x: Any, y: Any) -> list[Any]:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss
        for _ in range(3):
            optimizer.step(closure)
        return weights(model)

    def make(model: Any) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    alone = net()
    expected = fit(make(alone), alone, x, y)

    def step(runtime: Runtime) -> list[Any]:
        model = net()
        wrapped = DistributedOptimizer(make(model), model.named_parameters(), _runtime=runtime)
        return fit(wrapped, model, share(x, runtime), share(y, runtime))
    for found in threads(2, step):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wraps_first", [False, True])
def test_autocast_scaler_and_scheduler(wraps_first: bool) -> None:
    def step(runtime: Runtime) -> tuple[list[Any], float]:
        model = net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if wraps_first:
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), _runtime=runtime)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6)
        if not wraps_first:
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), _runtime=runtime)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for turn, (x, y) in enumerate(batches(5, 2)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(share(x, runtime)).float(), share(y, runtime))
            if turn == 2 and runtime.world.rank == 1:
                loss = loss * float("inf")  # an overflow on one rank skips the step on all
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
        return weights(model), scaler.get_scale()
    (one, scale), (other, other_scale) = threads(2, step)
    assert scale == other_scale == 128.0
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)
