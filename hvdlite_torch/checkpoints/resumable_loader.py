"""`hvd.resumable`: a DataLoader whose place can be saved, and which goes on there, with any number of ranks.

| loader | what decides the order | ranks |
|---|---|---|
| map style, `DistributedSampler` or a subclass | seed and epoch: the order of a copy for one rank | any number |
| map style, another sampler or batch sampler | the state of the sampler's generator at the begin of the epoch | one |
| iterable style, the dataset has `state_dict` and `load_state_dict` | the dataset | the same number |

A batch counts as consumed as soon as the loop has it, as in torchdata's `StatefulDataLoader`: save after its step and before
the next batch. What workers have read ahead does not count. Batches that are skipped are never loaded.

The order of samples costs the script no random numbers but one: for a sampler without a generator of its own, another
generator stands in for torch's default one, and is seeded from it when the first order is drawn. Workers are seeded by the
process' seed, the epoch, the position and the rank.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from hvdlite import api
from hvdlite.training.checkpoints.kinds import has_state
from hvdlite.training.positions import by_turns, rank_share, refuse_other

_FOR_RANKS = "DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())"


def resumable(loader: DataLoader[Any]) -> ResumableLoader | ResumableStream:
    """Return a loader like this one, with a place that can be saved and loaded: `state_dict`, `load_state_dict`, `epoch`.

    The loop `for epoch in range(loader.epoch, 90): for batch in loader: ...` goes on at the precise batch; leaving the inner
    loop early and beginning it again does so, too. `set_epoch` of the sampler is called.

    Args:
        loader: of samples by index, with a `DistributedSampler` if the job has several ranks; or of an `IterableDataset`
            that has `state_dict()` and `load_state_dict()`, without workers.

    Raises:
        TypeError: for something else, and for a subclass of DataLoader with an `__iter__` of its own.
        ValueError: for a sampler that does not divide the samples among the ranks of the job.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(f"hvd.resumable takes a torch.utils.data.DataLoader that iterates as torch's does, and no "
                        f"{type(loader).__name__}: nobody knows its place. Make a DataLoader of its dataset; an object with "
                        "a state_dict() of its own needs no hvd.resumable")
    return ResumableStream(loader) if isinstance(loader.dataset, IterableDataset) else ResumableLoader(loader)


class PositionedLoader:
    """A map-style DataLoader that knows its place; a subclass says what a rank takes.

    Attributes:
        epoch: the number of epochs that are complete.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.epoch = 0
        self._consumed = 0  # global samples of this epoch
        self._begin: torch.Tensor | None = None  # the generator's state with which this epoch's order is drawn
        self._checksum: int | None = None  # of this epoch's order, once it is drawn
        self._drawn: list[Any] | None = None  # this epoch's order
        self._own_loader = loader
        batched = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._batch_sampler = batched if type(batched) is BatchSampler else None  # others decide themselves what a batch is
        self._sampler: Any = batched if self._batch_sampler is None else self._batch_sampler.sampler
        self._stand_in: torch.Generator | None = None  # for torch's default generator
        self._seeds = torch.Generator()  # of workers
        self._indices = _Indices()  # stands in for the sampler or the batch sampler
        self._left: list[tuple[int, Any]] | None = None  # of this epoch, since the iteration began
        self._inner = copy.copy(loader)
        vars(self._inner).update({  # DataLoader refuses assignments: its iterators would not notice
            "sampler" if loader.batch_sampler is None else "batch_sampler": self._indices,
            "generator": self._seeds, "_iterator": None, "in_order": True})

    def state_dict(self) -> dict[str, Any]:
        """Return the place: numbers, texts, and the state of a generator as a tensor of bytes."""
        source = self._source()
        begin = source.get_state() if self._begin is None and source is not None else self._begin
        return {"epoch": self.epoch, "consumed": self._consumed, "generator": begin, "order": self._checksum,
                **self._facts()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a place with the next iteration.

        Raises:
            ValueError: when it is a place in the middle of an epoch that has another order here.
        """
        refuse_other(state_dict, self._facts())
        self.epoch, self._consumed, self._begin = state_dict["epoch"], state_dict["consumed"], state_dict["generator"]
        self._checksum, self._drawn, self._left = state_dict["order"], None, None

    def _facts(self) -> dict[str, Any]:
        """Return what the order depends on."""
        seed = self._sampler.seed if isinstance(self._sampler, DistributedSampler) else None
        return {"samples": len(self._own_loader.dataset),  # type: ignore[arg-type]
                "sampler": type(self._sampler).__name__, "seed": seed}

    def _order(self) -> list[Any]:
        """Return this epoch's order of samples, or of batches where a batch sampler of the script makes them.

        Raises:
            ValueError: when it is not the one in which a loaded place counts.
        """
        if self._drawn is not None:
            return self._drawn
        for sampler in (self._own_loader.batch_sampler, self._sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        order = self._draw()
        checksum = zlib.crc32(repr(order).encode())
        if self._consumed and checksum != self._checksum:
            raise ValueError(f"the {type(self._sampler).__name__} gives epoch {self.epoch} another order than when the "
                             f"place after {self._consumed} samples was saved: it draws from something else than its "
                             "`generator` or torch's default one, or the data have changed. Let it draw from a "
                             "torch.Generator that is its attribute `generator`")
        self._drawn, self._checksum = order, checksum
        return order

    def _draw(self) -> list[Any]:
        """Draw the order, from `_begin` if there is one."""
        source = self._source()
        if source is None:
            return _undivided(self._sampler)
        self._begin = source.get_state() if self._begin is None else self._begin
        source.set_state(self._begin)
        if source is not self._stand_in:
            return list(self._sampler)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._begin)
            order = list(self._sampler)
            source.set_state(torch.get_rng_state())
        return order

    def _source(self) -> torch.Generator | None:
        """Return the generator from which the order is drawn; None if it comes from seed and epoch."""
        if isinstance(self._sampler, DistributedSampler):
            return None
        own = getattr(self._sampler, "generator", None)
        if isinstance(own, torch.Generator):
            return own
        if self._stand_in is None:
            self._stand_in = torch.Generator()
            if self._begin is None:
                self._stand_in.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return self._stand_in

    def _loaded(self, items: list[tuple[int, Any]], own: Callable[[Any], Any] = lambda indices: indices
                ) -> Iterator[tuple[int, Any]]:
        """Yield a batch for each item: the position after it, and the batch.

        Args:
            items: pairs of the position and the indices.
            own: returns this rank's part of the next item's indices, when the loader asks for that.
        """
        self._indices[:], self._indices.own = [indices for _, indices in items], own
        self._seeds.manual_seed(hash((torch.initial_seed(), self.epoch, self._consumed, api.rank())) % 2**63)
        for batch, (position, _) in zip(self._inner, items, strict=False):  # the loader comes first: it has to end, too
            yield position, batch

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._consumed, self._begin, self._checksum, self._drawn, self._left = 0, None, None, None, None


class _Indices(list[Any]):
    """Indices of which the loader gets this rank's part."""

    own: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.own, super().__iter__())


class ResumableLoader(PositionedLoader):
    """A DataLoader that goes on where it was; see `resumable`. Other attributes are those of the loader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        sampler, size = self._sampler, api.size()
        if isinstance(sampler, DistributedSampler):
            if sampler.num_replicas != size:
                raise ValueError(f"the loader's {type(sampler).__name__} divides samples among {sampler.num_replicas} "
                                 f"ranks, and the job has {size}: make it by {_FOR_RANKS}")
            self._check_subclass(sampler)
        elif size > 1:
            raise ValueError(f"rank {api.rank()} of {size}: hvd.resumable needs samples that are divided among the ranks, "
                             f"and this loader's {type(sampler).__name__} does not say how. Give the loader a "
                             f"sampler={_FOR_RANKS}, and batch_size instead of a batch sampler")

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of an epoch."""
        self._left = self._rest()
        for position, batch in self._loaded(self._left):
            self._consumed = position
            yield batch
        self._end_epoch()

    def __len__(self) -> int:
        """Return the number of batches that are left: of the iteration, where one has begun, since its beginning."""
        if self._left is None:
            self._left = self._rest()
        return len(self._left)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_own_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._own_loader, name)

    def _rest(self) -> list[tuple[int, Any]]:
        """Return this rank's batches of the rest of the epoch: the position after each, and its indices."""
        order, batched = self._order(), self._batch_sampler
        if batched is None and self._own_loader.batch_sampler is not None:
            ends = itertools.accumulate(map(len, order))
            return [(end, batch) for end, batch in zip(ends, order, strict=True) if end > self._consumed]
        steps = by_turns(order, self._consumed, api.rank(), api.size(), getattr(batched, "batch_size", 1),
                         drops=getattr(self._sampler, "drop_last", False), drops_batch=getattr(batched, "drop_last", False))
        return [(end, batch[0]) for end, batch in steps] if batched is None else steps

    @staticmethod
    def _check_subclass(sampler: DistributedSampler[Any]) -> None:
        """Raise `ValueError` where ranks' samples are not those of a sampler for one rank, by turns."""
        if type(sampler) is not DistributedSampler:
            share = rank_share(_undivided(sampler), 0, sampler.rank, sampler.num_replicas, drops=sampler.drop_last)
            if share != list(sampler):
                raise ValueError(f"rank {sampler.rank}'s samples of {type(sampler).__name__} are not every "
                                 f"{sampler.num_replicas}th of those that it gives with num_replicas=1: no other number of "
                                 "ranks could go on in their order. Use torch's DistributedSampler")


class ResumableStream:
    """A DataLoader of an `IterableDataset` that can save its own place, which is this rank's; see `resumable`.

    Attributes:
        epoch: the number of epochs that are complete.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.epoch = 0
        self._loader = loader
        self._dataset: Any = loader.dataset
        if not has_state(self._dataset):
            raise TypeError(f"the place in a {type(self._dataset).__name__} cannot be saved: it has no state_dict() and "
                            "load_state_dict(), such as a shard and the offset in it. Add them, or use a dataset of "
                            f"samples by index, with a sampler={_FOR_RANKS}")
        if loader.num_workers:
            raise ValueError(f"the {type(self._dataset).__name__} is iterated in {loader.num_workers} workers, which read "
                             "ahead of the loop: make the loader with num_workers=0, or use torchdata's StatefulDataLoader, "
                             "which needs no hvd.resumable")

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of an epoch."""
        yield from self._loader
        self.epoch += 1

    def __len__(self) -> int:
        """Return the loader's length, if it has one."""
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of this rank."""
        return {"epoch": self.epoch, "rank": api.rank(), "ranks": api.size(), "dataset": self._dataset.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at this rank's place.

        Raises:
            ValueError: when another number of ranks has saved it, or another rank.
        """
        saved, here = ((state_dict["rank"], state_dict["ranks"]), (api.rank(), api.size()))
        if saved != here:
            raise ValueError(f"rank {here[0]} of {here[1]}: the place in the {type(self._dataset).__name__} was saved by "
                             f"rank {saved[0]} of {saved[1]}, and only the same number of ranks can go on there; samples by "
                             f"index (sampler={_FOR_RANKS}) go on with any number")
        self.epoch = state_dict["epoch"]
        self._dataset.load_state_dict(state_dict["dataset"])


def _undivided(sampler: DistributedSampler[Any]) -> list[Any]:
    """Return the samples that a sampler like this one gives a single rank."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return list(whole)
