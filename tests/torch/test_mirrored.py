"""`MirroredStrategy`: ranks that train on shares of global batches equal one process, and scopes leave nothing behind."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import MirroredStrategy  # noqa: E402
from hvdlite_torch.optimizer import is_distributed  # noqa: E402
from hvdlite_torch.rows import mapped  # noqa: E402
from tests.worlds import TORCH, processes, threads  # noqa: E402

SAMPLES = 101


class Net(torch.nn.Module):
    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator))


def weights(model: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in model.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def train(model: Any, optimizer: Any, batches: Any, epochs: int, clip: bool,
          reduce: Callable[[Any], Any] = lambda loss: loss) -> list[float]:
    curve = []
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            curve.append(float(reduce(loss.detach())))
    return curve


def assert_close(ours: list[Any], theirs: list[Any], msg: str | None = None) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, msg=msg)


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
        strategy = MirroredStrategy(_runtime=runtime)
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
            strategy = MirroredStrategy(backward_passes_per_step=passes, _runtime=runtime)
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
            assert not strategy._registry.weight.is_applied, "even batches cost nothing, nor does what comes after a loop"
    threads(2, step)


# --- scopes ------------------------------------------------------------------------------------------------------------


def patched() -> bool:
    return hasattr(torch.optim.Optimizer.__init__, "__wrapped__") or hasattr(torch.nn.Module.__init__, "__wrapped__")


def test_a_scope_leaves_nothing_behind() -> None:
    def step(runtime: Runtime) -> None:
        originals = vars(torch.optim.Optimizer)["__init__"], vars(torch.nn.Module)["__init__"]
        strategy, other = MirroredStrategy(_runtime=runtime), MirroredStrategy(_runtime=runtime)
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
        strategy = MirroredStrategy(_runtime=runtime)
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
                known = len(strategy._registry._modules)
                module = torch.nn.Linear(1, 1)
                assert len(strategy._registry._modules) == known + 1, "it is remembered once"
            assert torch.nn.Module.__init__ is theirs
            torch.nn.Linear(1, 1)
            assert len(strategy._registry._modules) == known + 1 and calls == [torch.nn.Linear] * 2
            del module
        finally:
            torch.nn.Module.__init__ = original
    threads(1, step)


def test_two_threads_with_a_scope_each_and_one_without() -> None:
    """Ranks are threads here already; each of them trains two models on two more threads."""
    def step(runtime: Runtime) -> None:
        strategies = [MirroredStrategy(_runtime=runtime) for _ in range(2)]
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
        strategy = MirroredStrategy(_runtime=runtime) if runtime is not None else None
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            first, second = Net(1), Net(2)
            made = Made(first)
            halves = [torch.optim.SGD(second.layers[0].parameters(), lr=0.1, momentum=0.9),
                      torch.optim.Adam(second.layers[2].parameters(), lr=0.01)]
            halving = torch.optim.lr_scheduler.StepLR(halves[0], 2, 0.5)
        if strategy is not None:
            assert all(is_distributed(optimizer) for optimizer in (made.optimizer, *halves))
            assert made.optimizer._parameter_names[first.layers[0].weight] == "layers.0.weight"
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
        strategy = MirroredStrategy(_runtime=runtime) if runtime is not None else None
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
        strategy = MirroredStrategy(_runtime=runtime) if runtime is not None else None
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


# --- mirroring ---------------------------------------------------------------------------------------------------------


class Normal(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
        self.register_buffer("offset", torch.randn(3))
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x))) + self.offset * self.frozen


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
        strategy = MirroredStrategy(_runtime=runtime)

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
        strategy = MirroredStrategy(_runtime=runtime)
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
        strategy = MirroredStrategy(_runtime=runtime)
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
        assert not strategy._registry.schedule.has_loaded
        for each in copies:
            each.load_state_dict(Net(seed=5).state_dict())
        assert not strategy._registry.schedule.has_loaded, "copies are not in the scope"
        model.layers[0].load_state_dict(copies[0].layers[0].state_dict())
        assert strategy._registry.schedule.has_loaded
        strategy.mirror()
        assert is_distributed(optimizer)
    threads(2, step)


def test_parameters_without_values_yet_are_mirrored_when_they_have_some() -> None:
    def step(runtime: Runtime) -> list[Any]:
        strategy = MirroredStrategy(_runtime=runtime)
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
            strategy = MirroredStrategy(scale_learning_rate=scales, _runtime=runtime)
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
        assert [MirroredStrategy(given, _runtime=runtime).devices for given in (None, 3, ["a", "b"])] == [None, 3, 2]
        for wrong in ("2", 0, [], 1.5):
            with pytest.raises(ValueError, match="devices must be a number of ranks from 1"):
                MirroredStrategy(wrong, _runtime=runtime)
    threads(1, step)


def test_structures_keep_what_they_are() -> None:
    lists = collections.defaultdict(list, {"x": torch.ones(2)})
    doubled = mapped({"a": lists, "b": (torch.ones(1), [3])}, lambda leaf: leaf * 2)
    assert doubled["a"].default_factory is list and doubled["a"]["x"].tolist() == [2, 2] and doubled["b"][1] == [6]
    assert lists["x"].tolist() == [1, 1]


# --- processes ---------------------------------------------------------------------------------------------------------


def test_alone_and_launched() -> None:
    (alone,) = processes(1, """
        import warnings
        import torch
        import hvdlite_torch as hvd

        def main(strategy, start):
            torch.set_num_threads(1)
            with strategy.scope():
                model = torch.nn.Linear(2, 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, in strategy.distribute([(torch.arange(6.0).reshape(3, 2) + start,)]):
                model(x).mean().backward()
                optimizer.step()
            return strategy.num_replicas_in_sync, strategy.reduce("SUM", hvd.rank()), model.weight.tolist()

        if __name__ == "__main__":
            strategy = hvd.MirroredStrategy(devices=2)
            assert strategy.num_replicas_in_sync == 1
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                first = main(strategy, start=1.0)
            assert "hvdrun -np 2" in str(caught[0].message)
            assert first[:2] == (1, 0)
            assert strategy.launch(main, (strategy,), {"start": 1.0})[:2] == (2, 1)
            assert hvd.MirroredStrategy().launch(main, (hvd.MirroredStrategy(), 1.0))[:2] == (1, 0)
            print("fine")
    """, timeout=150, imported=TORCH)
    assert "fine" in alone.stdout
