"""What users combine the optimizer with: uneven data, torch.compile, the profiler, autocast, LBFGS, schedulers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import OPTIMIZERS, batches, net, share, train, weights  # noqa: E402
from tests.torch.programs import beside_torch as programs  # noqa: E402
from tests.worlds import TORCH, processes, threads  # noqa: E402


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_with_fewer_batches_join_and_end_up_equal(kind: str) -> None:
    def step(runtime: Runtime) -> list[Any]:
        model = net()
        optimizer = wrap_optimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), runtime=runtime)
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


@pytest.mark.slow
def test_compiled_models_and_steps_train_like_plain_ones() -> None:
    processes(2, programs.compiled_models_and_steps_train_like_plain_ones, timeout=120, imported=TORCH)


def test_the_profiler_shows_where_gradients_are_waited_for() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
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
        wrapped = wrap_optimizer(make(model), model.named_parameters(), runtime=runtime)
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
            optimizer = wrap_optimizer(optimizer, model.named_parameters(), runtime=runtime)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6)
        if not wraps_first:
            optimizer = wrap_optimizer(optimizer, model.named_parameters(), runtime=runtime)
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


class Tied(torch.nn.Module):
    """Tied weights, a frozen layer, a layer that is never used, and one that only every other batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 6)
        self.frozen = torch.nn.Linear(6, 6)
        self.sometimes = torch.nn.Linear(6, 6)
        self.unused = torch.nn.Linear(6, 2)
        self.out = torch.nn.Linear(6, 9, bias=False)
        self.out.weight = self.table.weight
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape) + index / 10)
        self.frozen.requires_grad_(False)

    def forward(self, words: Any, sometimes: bool) -> Any:
        hidden = torch.tanh(self.frozen(self.table(words)))
        return self.out(torch.tanh(self.sometimes(hidden)) if sometimes else hidden)


KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True, weight_decay=0.1),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tied_frozen_unused_accumulated_clipped_and_autocast(kind: str, half: bool, size: int) -> None:
    steps, passes = 6, 2
    words = torch.randint(0, 9, (steps, passes, size, 8), generator=torch.Generator().manual_seed(1))

    def run(optimizer: Any, model: Any, ranks: list[int]) -> list[Any]:
        for step in range(steps):
            optimizer.zero_grad()
            for each in range(passes):
                batch = words[step, each, ranks].reshape(-1)
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    loss = torch.nn.functional.cross_entropy(model(batch, step % 2 == 0).float(), batch.roll(1))
                (loss / passes).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return weights(model)

    # The losses are means over batches that are not cut between the ranks' shares, so each rank's is compared by itself.
    def alone() -> list[Any]:
        model = Tied()
        optimizer = KINDS[kind](model.parameters())
        for step in range(steps):
            optimizer.zero_grad()
            for each in range(passes):
                for rank in range(size):
                    batch = words[step, each, rank]
                    with torch.autocast("cpu", torch.bfloat16, enabled=half):
                        loss = torch.nn.functional.cross_entropy(model(batch, step % 2 == 0).float(), batch.roll(1))
                    (loss / (passes * size)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return weights(model)

    def step(runtime: Runtime) -> list[Any]:
        model = Tied()
        wrapped = wrap_optimizer(KINDS[kind](model.parameters()), model.named_parameters(),
                                 backward_passes_per_step=passes, runtime=runtime)
        found = run(wrapped, model, [runtime.world.rank])
        assert model.unused.weight.grad is None and model.out.weight is model.table.weight
        return found
    expected, tolerance = alone(), {"rtol": 2e-2, "atol": 2e-3} if half else {"rtol": 1e-4, "atol": 1e-5}
    for found in threads(size, step):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, **tolerance)
