"""`MirroredStrategy`: ranks that train on shares of global batches equal one process, and scopes leave nothing behind."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.optimizer import is_distributed  # noqa: E402
from hvdlite_torch.rows import mapped  # noqa: E402
from tests.torch.mirroring import (  # noqa: E402
    OPTIMIZERS,
    Net,
    Normal,
    assert_close,
    dataset,
    registry_of,
    strategy_on,
    train,
    weights,
)
from tests.worlds import TORCH, processes, threads  # noqa: E402


@pytest.mark.parametrize(("size", "samples", "batch"), [
    pytest.param(2, 101, 16, id="uneven"), pytest.param(3, 101, 16, id="uneven on 3"),
    pytest.param(2, 5, 16, id="dataset below a batch"), pytest.param(3, 11, 2, id="batch below the ranks"),
    pytest.param(3, 20, 6, id="2 rows left for 3")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_with_the_global_batch_equal_one_process(kind: str, size: int, samples: int, batch: int) -> None:
    """Tolerance 1e-4: sums of float32 in another order."""
    epochs = -(-24 // -(-samples // batch))
    clip = kind == "sgd"
    alone = Net()
    loader = DataLoader(dataset(samples), batch, shuffle=True, generator=torch.Generator().manual_seed(7))
    expected = train(alone, OPTIMIZERS[kind](alone.parameters()), loader, epochs, clip)
    assert len(expected) >= 20

    def step(runtime: Runtime) -> tuple[list[float], list[Any]]:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model = Net(seed=runtime.world.rank)  # rank 0's counts
            if runtime.world.rank == 0:
                model.load_state_dict(Net().state_dict())
            optimizer = OPTIMIZERS[kind](model.parameters())
        seed = 7 if runtime.world.rank == 0 else 8  # rank 0's order counts
        shuffled = DataLoader(dataset(samples), batch, shuffle=True, generator=torch.Generator().manual_seed(seed))
        batches = strategy.distribute(shuffled)
        assert len(batches) == len(shuffled) and batches.batch_size == batch
        curve = train(model, optimizer, batches, epochs, clip, lambda loss: strategy.reduce("MEAN", loss))
        return curve, weights(model)

    results = threads(size, step)
    for curve, ours in results:
        assert curve == pytest.approx(expected, rel=1e-4)
        assert all(torch.equal(mine, first) for mine, first in zip(ours, results[0][1], strict=True)), "ranks differ"
        assert_close(ours, weights(alone))


def test_gradients_are_weighted_before_they_are_accumulated() -> None:
    batches = [dataset(rows)[:] for rows in (8, 7, 5, 3, 8, 1)]
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for index, (x, y) in enumerate(batches):
        torch.nn.functional.mse_loss(alone(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()

    def step(runtime: Runtime) -> None:
        for passes in (1, 2):
            strategy = strategy_on(runtime, backward_passes_per_step=passes)
            with strategy.scope():
                model = Net()
                mine = torch.optim.SGD(model.parameters(), lr=0.1)
            for index, (x, y) in enumerate(strategy.distribute(batches)):
                with mine.no_sync() if passes == 1 and index % 2 == 0 else contextlib.nullcontext():
                    torch.nn.functional.mse_loss(model(x), y).backward()
                if index % 2:
                    mine.step()
                    mine.zero_grad()
            assert_close(weights(model), weights(alone))
            assert registry_of(strategy).weight.value == 1, "what comes after a loop has no weight"
    threads(2, step)


def everything(model: Any, optimizer: Any) -> list[Any]:
    state = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values() if value is not None]
    return [*(value.clone() for value in model.state_dict().values()), *map(torch.as_tensor, copy.deepcopy(state)),
            torch.tensor(optimizer.param_groups[0]["lr"])]


@pytest.mark.parametrize("where", ["in the scope", "after it", "rank 0 alone", "between epochs, rank 0 alone", "later"])
@pytest.mark.parametrize("loop", ["distributed", "by hand", "run"])
def test_a_checkpoint_is_mirrored_before_the_next_step(where: str, loop: str) -> None:
    saved_model = Normal(99)
    saved_optimizer = torch.optim.Adam(saved_model.parameters(), lr=0.5)
    train(saved_model, saved_optimizer, DataLoader(dataset(24), 8), 1, clip=False)
    saved = copy.deepcopy((saved_model.state_dict(), saved_optimizer.state_dict()))
    if where.startswith("between") and loop != "distributed":
        pytest.skip("ranks agree about that at the beginning of a distributed epoch only")

    def step(runtime: Runtime) -> list[Any]:
        rank = runtime.world.rank
        strategy = strategy_on(runtime)

        def load() -> None:
            if rank == 0:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            elif "alone" not in where:  # something else, which loses
                model.load_state_dict(Normal(5).state_dict())
        with strategy.scope():
            model = Normal(rank)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + rank)
            if where == "in the scope":
                load()
        if where in ("after it", "rank 0 alone"):
            load()
        if where.startswith("between") or where == "later":
            train(model, optimizer, strategy.distribute(DataLoader(dataset(16), 8)), 1, clip=False)
            load()
        if loop == "distributed":
            next(iter(strategy.distribute(DataLoader(dataset(8), 8))))
        elif loop == "run":
            assert strategy.run(lambda value, more: value + more, (1,), {"more": 2}) == 3
        else:
            for parameter in model.parameters():
                parameter.grad = None
            optimizer.step()  # nobody has a gradient: nothing moves
        return everything(model, optimizer)

    expected = everything(*_loaded(saved))
    for ours in threads(2, step):
        assert len(ours) == len(expected)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expected, strict=True))


def _loaded(saved: Any) -> tuple[Any, Any]:
    model = Normal(0)
    optimizer = torch.optim.Adam(model.parameters())
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return model, optimizer


def test_ranks_that_make_different_things_are_told() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        strategy = strategy_on(runtime)
        with strategy.scope():
            layer = torch.nn.Linear(2, 2 + rank)
            told = r"replica 0 has 'weight', float32 \[2, 2\], replica 1 'weight', float32 \[3, 2\]"
            with pytest.raises(MismatchError, match=told):
                torch.optim.SGD(layer.parameters(), lr=0.1)
            del layer
            if rank == 0:
                probe = torch.nn.Linear(2, 2)  # on one rank only: that alone is nobody's fault
                values = probe.weight.detach().clone()
            model = Net(seed=rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, strategy.distribute(DataLoader(dataset(16), 8)), 1, clip=False)
        if rank == 0:
            assert torch.equal(probe.weight, values)
        alone = Net(seed=0)
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), DataLoader(dataset(16), 8), 1, clip=False)
        assert_close(weights(model), weights(alone))
        with strategy.scope():
            buffer = torch.nn.BatchNorm1d(3 + rank)
        told = r"'BatchNorm1d0.*' is float32 \[3\] on replica 0 and float32 \[4\] on replica 1"
        with pytest.raises(MismatchError, match=told):
            strategy.mirror()
        del buffer
    threads(2, step)


def test_copies_of_modules_and_of_the_strategy() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        strategy = strategy_on(runtime)
        with strategy.scope():
            model = Net(seed=rank)
            average = torch.optim.swa_utils.AveragedModel(model)  # holds a copy that no constructor told of
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.mirror()
        assert_close(weights(average.module), weights(Net(seed=0)))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = copy.deepcopy(model), torch.load(file, weights_only=False)
        assert not registry_of(strategy).schedule.has_loaded
        for each in copies:
            each.load_state_dict(Net(seed=5).state_dict())
        assert not registry_of(strategy).schedule.has_loaded, "copies are not in the scope"
        model.layers[0].load_state_dict(copies[0].layers[0].state_dict())
        assert registry_of(strategy).schedule.has_loaded
        strategy.mirror()
        assert is_distributed(optimizer)
    threads(2, step)


def test_parameters_without_values_yet_are_mirrored_when_they_have_some() -> None:
    def step(runtime: Runtime) -> list[Any]:
        strategy = strategy_on(runtime)
        torch.manual_seed(runtime.world.rank)
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LazyLinear(3))
            optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        for x, y in strategy.distribute(DataLoader(dataset(16), 8)):
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return weights(model)
    first, second = threads(2, step)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def test_learning_rates_are_scaled_when_asked() -> None:
    def step(runtime: Runtime) -> None:
        for scales in (False, True):
            strategy = strategy_on(runtime, scale_learning_rate=scales)
            factor = 3 if scales else 1
            expected = [0.1 * factor, 0.25 * factor, 0.1 * factor]
            with strategy.scope():
                model = Net()
                groups = [{"params": model.layers[0].parameters()}, {"params": [model.layers[2].weight], "lr": 0.25}]
                optimizer = torch.optim.SGD(groups, lr=0.1)
            optimizer.add_param_group({"params": [model.layers[2].bias]})
            assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
            train(model, optimizer, strategy.distribute(DataLoader(dataset(16), 8)), 2, clip=False)
            alone = Net()
            groups = [{"params": [parameter], "lr": lr} for parameter, lr in zip(
                (alone.layers[0].weight, alone.layers[0].bias, alone.layers[2].weight, alone.layers[2].bias),
                (expected[0], *expected), strict=True)]
            train(alone, torch.optim.SGD(groups), DataLoader(dataset(16), 8), 2, clip=False)
            assert_close(weights(model), weights(alone))
    threads(3, step)


def test_devices_are_counted_or_listed() -> None:
    def step(runtime: Runtime) -> None:
        assert [strategy_on(runtime, given).devices for given in (None, 3, ["a", "b"])] == [None, 3, 2]
        for wrong in ("2", 0, [], 1.5):
            with pytest.raises(ValueError, match="devices must be a number of ranks from 1"):
                strategy_on(runtime, wrong)
    threads(1, step)


def test_structures_keep_what_they_are() -> None:
    lists = collections.defaultdict(list, {"x": torch.ones(2)})
    doubled = mapped({"a": lists, "b": (torch.ones(1), [3])}, lambda leaf: leaf * 2)
    assert doubled["a"].default_factory is list and doubled["a"]["x"].tolist() == [2, 2] and doubled["b"][1] == [6]
    assert lists["x"].tolist() == [1, 1]


@pytest.mark.slow
def test_alone_and_launched() -> None:
    (alone,) = processes(1, Path(__file__).parent / "programs/mirrored_launch.py", timeout=150, imported=TORCH)
    assert "fine" in alone.stdout
