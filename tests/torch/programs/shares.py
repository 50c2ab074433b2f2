"""Programs of test_shares.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import hvdlite_torch as hvd
from tests.training.random_shares import draw_shares

ROWS, BATCH = 90, 17
"""The last batch has fewer rows, but more than there are ranks."""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*data(), strict=True))


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(list(super().__iter__()))


class Batches(torch.utils.data.Dataset[Any]):
    """A dataset whose samples are batches."""

    def __len__(self) -> int:
        return len(data()[0].split(BATCH))

    def __getitem__(self, index: int) -> Any:
        return tuple(column.split(BATCH)[index] for column in data())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, dtype=torch.float64, generator=generator)
    return x, torch.randn(ROWS, 2, dtype=torch.float64, generator=generator)


def loaders() -> dict[str, Callable[[], Any]]:
    """Return a way to make a loader of the same batches, by kind; some have workers."""
    def indexed(**options: Any) -> Any:
        return DataLoader(TensorDataset(*data()), BATCH, **options)
    return {
        "list": lambda: list(zip(*(column.split(BATCH) for column in data()), strict=True)),
        "indexed": indexed, "workers": lambda: indexed(num_workers=2, prefetch_factor=3, persistent_workers=True),
        "batch sampler": lambda: DataLoader(TensorDataset(*data()), batch_size=None,
                                            sampler=BatchSampler(SequentialSampler(range(ROWS)), BATCH, False)),
        "stream": lambda: DataLoader(Stream(), BATCH),
        "stream of a worker": lambda: DataLoader(Stream(), BATCH, num_workers=1, persistent_workers=True),
        "batches": lambda: DataLoader(Batches(), batch_size=None, num_workers=1, persistent_workers=True),
        "own iteration": lambda: OwnLoader(TensorDataset(*data()), BATCH)}


def trained(loader: Any, distribute: Callable[[Any], Any], scope: Callable[[], Any], mean: Callable[[Any], Any],
            epochs: int = 3) -> tuple[list[float], list[torch.Tensor], list[int]]:
    """Return losses, parameters and this rank's rows."""
    torch.manual_seed(3)
    with scope():
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
        model.double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses, rows = [], []
    batches = distribute(loader)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(mean(loss.detach())))
            rows.append(len(x))
    return losses, [each.detach() for each in model.parameters()], rows


def random_shares_train_like_one_process() -> None:
    """Also BatchNorm, with every kind of loader, and with fixed shares."""
    torch.set_num_threads(1)
    hvd.init()
    for kind, make in loaders().items():
        losses, parameters, _ = trained(make(), lambda loader: loader, contextlib.nullcontext, float)
        for seed in range(2):
            strategy = hvd.MirroredStrategy(shares="auto" if seed else [3, 1, 2], sync_batch_norm=True)
            if seed:
                draw_shares(strategy._shares, seed)
            found = trained(make(), strategy.distribute, strategy.scope, functools.partial(strategy.reduce, "MEAN"))
            assert len(set(found[2])) > (4 if seed else 0), (kind, found[2])
            for one, other in zip([*found[0], *found[1]], [*losses, *parameters], strict=True):
                torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-12, atol=1e-12)


def shares_follow_speeds() -> None:
    """Rank 1 needs three times as long for a row, by a clock of the test's."""
    torch.set_num_threads(1)
    hvd.init()
    seconds = [0.0]
    for kind, make in loaders().items():
        strategy = hvd.MirroredStrategy(shares="auto")
        setattr(strategy._shares, "clock", lambda: seconds[0])  # noqa: B010 - a method
        rows = []
        for epoch in range(30):
            if epoch % 15 == 0:
                batches = strategy.distribute(make())
            for x, _ in batches:
                seconds[0] += (1, 3, 1)[hvd.rank()] * len(x)
                rows.append(len(x))
        assert sum(rows[-6:-1]) == 5 * (8, 2, 7)[hvd.rank()], (kind, rows)
        assert len(rows) == 30 * 6 and sum(map(sum, hvd.allgather_object(rows))) == 30 * ROWS


def evaluation_loops_and_breaks_leave_ranks_alike() -> None:
    """Loops inside loops, and loops that end early, with random shares and workers."""
    torch.set_num_threads(1)
    hvd.init()
    strategy = hvd.MirroredStrategy(shares="auto")
    numbers = torch.arange(ROWS)
    outer, inner = (strategy.distribute(DataLoader(Numbers(), BATCH, num_workers=workers)) for workers in (2, 0))
    clock = iter(range(10 ** 9))
    setattr(strategy._shares, "clock", lambda: next(clock) * (1.0 + 2 * (hvd.rank() == 1)))  # noqa: B010 - a method
    for epoch in range(12):
        for index, batch in enumerate(outer):
            whole = strategy.gather(batch)
            assert torch.equal(whole, numbers[index * BATCH:(index + 1) * BATCH]), (epoch, index)
            if index == 2:
                evaluated = [strategy.gather(each) for each in inner]
                assert torch.equal(torch.cat(evaluated), numbers)
            if index == 4 and epoch % 3:
                break
    assert len(strategy._shares._splits) > 1


def casts_between_batches() -> None:
    """A model that is cast before a batch is taken trains like one process; after that its gradients have no weight."""
    hvd.init()
    strategy = hvd.MirroredStrategy(shares=[3, 1])
    x, y = (column.float() for column in data())
    batches = [(x[begin:begin + 8], y[begin:begin + 8]) for begin in range(0, 48, 8)]

    def train(loader: Any, model: Any, optimizer: Any) -> Any:
        rows = iter(loader)
        for number in range(len(batches) - 1):
            if number == 2:
                model.double()
            inputs, targets = next(rows)
            optimizer.zero_grad()
            model(inputs.to(model.weight.dtype)).sub(targets).square().mean().backward()
            optimizer.step()
        return rows

    torch.manual_seed(1)
    alone = torch.nn.Linear(5, 2)
    train(batches, alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    with strategy.scope():
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = train(strategy.distribute(batches), model, optimizer)
    torch.testing.assert_close(model.weight, alone.weight, rtol=0, atol=1e-6)
    inputs, targets = next(rows)
    model.float()
    with pytest.raises(hvd.UnsupportedError, match=r"rank \d: parameters were cast or moved after"):
        model(inputs).sub(targets).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
