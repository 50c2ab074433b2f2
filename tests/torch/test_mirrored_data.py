"""Loaders and datasets that `MirroredStrategy` shares out: iterations of their own, data that are split already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, random_split  # noqa: E402

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.rows import rows_of, rows_taken  # noqa: E402
from tests.torch.mirroring import strategy_on  # noqa: E402
from tests.worlds import threads  # noqa: E402


class Buffered(DataLoader):
    """A subclass with an iteration of its own, as MONAI's and torchdata's: here it loads two batches ahead."""

    def __iter__(self) -> Iterator[Any]:
        ahead: list[Any] = []
        for batch in super().__iter__():
            ahead.append(batch)
            if len(ahead) > 2:
                yield ahead.pop(0)
        yield from ahead


def test_loaders_with_an_iteration_of_their_own() -> None:
    def step(runtime: Runtime) -> list[list[int]]:
        strategy = strategy_on(runtime)
        loader = Buffered(TensorDataset(torch.arange(37)), 8, shuffle=True,
                          generator=torch.Generator().manual_seed(runtime.world.rank))
        return [strategy.gather(x).tolist() for _ in range(2) for (x,) in strategy.distribute(loader)]
    generator = torch.Generator().manual_seed(0)
    expected = DataLoader(TensorDataset(torch.arange(37)), 8, shuffle=True, generator=generator)
    one_process = [x.tolist() for _ in range(2) for (x,) in expected]
    assert threads(2, step) == [one_process] * 2


def test_what_a_batch_is() -> None:
    batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "kernel": [1, 2, 3, 4], "mean": (0.1, 0.2, 0.3, 0.4),
             "classes": ("cat", "dog"), "scale": torch.tensor(2.0), "pair": [torch.ones(4, 2), torch.ones(4, 3)]}
    taken = rows_taken(batch, rows_of(batch), slice(0, 2))
    assert taken["x"].tolist() == [0, 1] and taken["names"] == ["a", "b"] and [len(each) for each in taken["pair"]] == [2, 2]
    assert all(taken[name] == batch[name] for name in ("kernel", "mean", "classes", "scale"))
    images = [torch.zeros(3, 8, 8) for _ in range(4)]
    for wrong in (images, {"images": images}, (images, torch.ones(4))):
        with pytest.raises(ValueError, match=r"a list of 4 tensors with 3 dimensions, such as \[3, 8, 8\].*stack them"):
            rows_of(wrong)
    assert rows_of(tuple(images)) == 3 and rows_of(images[:1]) == 3 and rows_of([images[0], torch.ones(3)]) == 3


class Split(IterableDataset):
    """A dataset that gives each rank samples of its own, as after WebDataset's split_by_node."""

    def __init__(self, rank: int, samples: int = 16, labels: bool = False) -> None:
        self.rank, self.samples, self.labels = rank, samples, labels

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.samples):
            x = torch.full((2,), 100.0 * self.rank + index)
            yield (x, index) if self.labels else x


class Sharded:
    """What a sampler of timm's or detectron2's looks like; none of them is a DistributedSampler."""

    rank, num_replicas = 0, 2

    def __init__(self) -> None:
        self.rank, self.num_replicas = 0, 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 8, 2))


class OfHuggingFace(IterableDataset):
    """What `datasets.distributed.split_dataset_by_node` leaves in an IterableDataset."""

    class _Config:
        rank, world_size = 0, 2

    def __init__(self) -> None:
        self._distributed = self._Config()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_data_that_are_split_already_are_not_split_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("hvdlite_torch.mirrored.same_data.warnings.warn", lambda text, **_: told.append(text))

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        strategy = strategy_on(runtime)
        for loader in (DataLoader(TensorDataset(torch.arange(8)), 2, sampler=Sharded()), DataLoader(OfHuggingFace(), 2)):
            with pytest.raises(ValueError, match=r"already splits the samples among 2 ranks.*without strategy.distribute"):
                strategy.distribute(loader)
        halves = Subset(TensorDataset(torch.arange(8)), range(rank, 8, 2))
        for loader in (DataLoader(halves, 2), Buffered(halves, 2),
                       DataLoader(random_split(range(8), [4, 4], torch.Generator().manual_seed(rank))[0], 2)):
            with pytest.raises(MismatchError, match="seed random_split alike"):
                next(iter(strategy.distribute(loader)))
        with pytest.raises(MismatchError, match="replica 1 has no batch, but others have"):
            next(iter(strategy.distribute(DataLoader(Split(0, samples=16 * (1 - rank)), 8))))
        for fine in (DataLoader(Split(0), 8), DataLoader(Split(rank, labels=True), 8), [torch.ones(4), torch.ones(4) + rank],
                     DataLoader(Split(0, samples=0), 8)):
            list(strategy.distribute(fine))
        strategy.reduce("SUM", 0)
        assert not told
        strategy.reduce("SUM", 0)
        for loader in (DataLoader(Split(rank), 8), DataLoader(Split(rank), batch_size=None), [torch.arange(4) + rank],
                       Buffered(Split(rank), 8)):
            list(strategy.distribute(loader))
        part = TensorDataset(torch.arange(8) + 8 * rank)
        part._fingerprint = f"half {rank}"  # type: ignore[attr-defined]  # as a Dataset of Hugging Face has one
        loader = strategy.distribute(DataLoader(part, 2))
        for _ in range(2):
            list(loader)
    threads(2, step)
    assert all("the others' samples are lost" in text and "split_by_node" in text for text in told)
    assert sum("nothing in common" in text for text in told) == 2 * 4 and sum("fingerprints" in text for text in told) == 2
