"""Each rank's shard of the global batches that a loader yields.

| loader | what is split | what decides the order |
|---|---|---|
| DataLoader, map style | the indices of each batch: a rank loads its own samples only | replica 0's sampler |
| DataLoader, iterable style | the samples of each batch, before they are collated | the dataset: the same on all ranks |
| DataLoader whose samples are batches, other iterables | the rows of each batch | replica 0's sampler; the iterable |
| a DataLoader's subclass with an `__iter__` of its own | the rows of each batch | replica 0's sampler |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hvdlite.core.errors import MismatchError
from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite.training.mirrored.shards import CurrentBatch, Split
from hvdlite.training.mirrored.shares import Shares, SharesPass
from hvdlite.training.mirrored.synchronized_sampler import SynchronizedSampler
from hvdlite_torch.mirrored import same_data
from hvdlite_torch.mirrored.scope_registry import ScopeRegistry
from hvdlite_torch.rows import rows_of, rows_taken
from hvdlite_torch.uncompiled import leave_to_python

_END: Any = object()


class DistributedLoader:
    """Yields this rank's shard of every global batch; other attributes are those of the loader that it was made from.

    All ranks iterate over it together, for the same number of batches. Each epoch begins with one small collective, in which
    ranks agree whether to mirror and check that they have the same data.

    Args:
        loader: a DataLoader, or an iterable of batches.
    """

    def __init__(self, loader: Iterable[Any], replicas: ReplicaGroup, registry: ScopeRegistry,
                 current: CurrentBatch, shares: Shares) -> None:
        self._loader, self._replicas, self._registry, self._current = loader, replicas, registry, current
        self._shares = shares
        self._source: _Source = _Whole(loader)
        if replicas.size > 1:
            self._source = source_of(loader, replicas, shares)
        self._is_compared, self._is_begun = not self._source.is_whole, False

    def __len__(self) -> int:
        """Return the number of global batches."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    @leave_to_python
    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's shard of one epoch's batches."""
        depth = self._agree()
        loop = object()
        shares = self._shares.begin(depth)
        try:
            for rows, batch in self._compared(self._source.batches(depth, shares)):
                self._registry.mirror_if_due()
                self._current.reached(loop, rows, shares.weight(rows))
                yield batch
                shares.finished()
        finally:
            self._current.over(loop)

    @leave_to_python
    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches; ranks compare the first batch of the first epoch if every rank loads whole batches."""
        if not self._is_compared:
            self._is_compared = True
            first = next(batches, _END)
            same_data.compare(self._replicas, None if first is _END else self._source.seen)
            if first is _END:
                return
            yield first
        yield from batches

    def _agree(self) -> int:
        """Agree whether to mirror; return the largest number of batches that a rank's workers prefetch.

        Raises:
            MismatchError: on all ranks, when they have different data.
        """
        if self._replicas.size == 1:
            return 0
        schedule = self._registry.schedule
        own = (self._source.facts(), self._source.depth, schedule.due or schedule.is_wanted,
               same_data.fingerprint(self._loader))
        everywhere = self._replicas.allgather_object(own, "epoch")
        for replica_id, (facts, *_) in enumerate(everywhere):
            if facts != everywhere[0][0]:
                raise MismatchError(f"ranks distribute different data: replica 0 has {everywhere[0][0]}, replica "
                                    f"{replica_id} {facts}")
        if not self._is_begun:
            self._is_begun = True
            same_data.compare_fingerprints([fingerprint for *_, fingerprint in everywhere])
        schedule.due = any(due for _, _, due, _ in everywhere)
        return max(depth for _, depth, *_ in everywhere)


class _Source:
    """The source of shards.

    Attributes:
        depth: the number of batches that workers prefetch.
        is_whole: whether every rank loads whole batches, in an order that the dataset decides.
        seen: the `signature` of the first batch, if it does.
    """

    depth = 0
    is_whole = False
    seen: list[str] | None = None

    def facts(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        return {}

    def batches(self, depth: int, shares: SharesPass) -> Iterator[tuple[int, Any]]:
        """Yield one epoch: the rows of each global batch, and this rank's shard."""
        raise NotImplementedError


class _Whole(_Source):
    """Batches where there is one replica."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def batches(self, depth: int, shares: SharesPass) -> Iterator[tuple[int, Any]]:
        return ((1, batch) for batch in self._loader)


class _Rows(_Source):
    """Rows of batches that every rank loads whole."""

    is_whole = True

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def facts(self) -> dict[str, Any]:
        return {"batches": _length(self._batches)}

    def batches(self, depth: int, shares: SharesPass) -> Iterator[tuple[int, Any]]:
        for rows, own, seen in map(RowsShard(shares.own), self._batches):
            self.seen = seen or self.seen
            yield rows, own


class _Stream(_Source):
    """Samples of an iterable dataset, which every rank iterates over.

    Args:
        split: of all batches; workers do not know the number of a batch.
    """

    is_whole = True

    def __init__(self, loader: DataLoader[Any], split: Split) -> None:
        kind = RowsShard if loader.batch_size is None else SamplesShard
        collate: Any = kind(split.own, loader.collate_fn)
        self._loader = _remade(loader, collate, batch_size=loader.batch_size, drop_last=loader.drop_last)

    def facts(self) -> dict[str, Any]:
        return {"samples": _length(self._loader.dataset), "workers": self._loader.num_workers,
                "batch_size": self._loader.batch_size}

    def batches(self, depth: int, shares: SharesPass) -> Iterator[tuple[int, Any]]:
        for rows, batch, seen in self._loader:
            self.seen = seen or self.seen
            yield rows, batch


class _Indexed(_Source):
    """Samples of a map-style dataset, in the order of replica 0's sampler.

    Args:
        split: of samples that are batches, as for `_Stream`.
    """

    def __init__(self, loader: DataLoader[Any], replicas: ReplicaGroup, split: Split) -> None:
        self._has_batches = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._indices = SynchronizedSampler(sampler, replicas, is_sharded=self._has_batches)
        self.depth = loader.num_workers * (loader.prefetch_factor or 0)
        if not self._has_batches:
            self._loader = _remade(loader, RowsShard(split.own, loader.collate_fn), batch_size=None, sampler=self._indices)
        elif loader.batch_sampler is None:
            self._loader = _remade(loader, loader.collate_fn, batch_size=None, sampler=self._indices)
        else:
            self._loader = _remade(loader, loader.collate_fn, batch_sampler=self._indices)

    def facts(self) -> dict[str, Any]:
        return {"samples": _length(self._loader.dataset), "batches": _length(self._indices.sampler),
                **same_data.subset(self._loader.dataset)}

    def batches(self, depth: int, shares: SharesPass) -> Iterator[tuple[int, Any]]:
        epoch = self._indices.begin(depth, shares)
        received = 0
        loaded = iter(self._loader)
        while True:
            epoch.look_ahead(received)
            item = next(loaded, _END)
            if item is _END:
                return
            received += 1
            yield (epoch.rows.popleft(), item) if self._has_batches else item[:2]


class _OwnIteration(_Source):
    """Rows of the batches of a DataLoader subclass with its own `__iter__`, in the order of replica 0's sampler.

    The subclass may do anything with batches, so every rank loads whole batches.
    """

    def __init__(self, loader: DataLoader[Any], replicas: ReplicaGroup) -> None:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = SynchronizedSampler(getattr(loader, name), replicas, is_batched=loader.batch_sampler is not None)
        self._loader = copy.copy(loader)
        vars(self._loader)[name] = self._indices  # DataLoader refuses assignment: its iterators would not notice

    def facts(self) -> dict[str, Any]:
        return {"samples": _length(self._loader.dataset), "batches": _length(self._indices.sampler),
                **same_data.subset(self._loader.dataset)}

    def batches(self, depth: int, shares: SharesPass) -> Iterator[tuple[int, Any]]:
        epoch = self._indices.begin(depth, shares)
        epoch.has_end = _length(self._indices.sampler) is not None  # then ranks may prefetch any number of batches
        return (each[:2] for each in map(RowsShard(shares.own), self._loader))


class RowsShard:
    """Converts this rank's shard of a batch; returns the batch's rows, the shard and the first signature.

    Args:
        own: returns this rank's rows of a batch with so many rows.
    """

    def __init__(self, own: Callable[[int], slice], convert: Callable[[Any], Any] = lambda batch: batch) -> None:
        self._own, self._convert = own, convert
        self._is_first = True

    def __call__(self, batch: Any) -> tuple[int, Any, list[str] | None]:
        seen, self._is_first = same_data.signature([batch]) if self._is_first else None, False
        rows = rows_of(batch)
        return rows, self._convert(rows_taken(batch, rows, self._own(rows))), seen


class SamplesShard(RowsShard):
    """Like `RowsShard`, of a batch that is a list of samples, which are collated."""

    def __call__(self, batch: list[Any]) -> tuple[int, Any, list[str] | None]:
        seen, self._is_first = same_data.signature(batch) if self._is_first else None, False
        return len(batch), self._convert(batch[self._own(len(batch))]), seen


def source_of(loader: Iterable[Any], replicas: ReplicaGroup, shares: Shares) -> _Source:
    """Return the source of this rank's shards of a loader's batches.

    Where shares follow speeds, no worker makes shards: those that would load whole batches.

    Raises:
        ValueError: for a loader that already splits samples among ranks.
    """
    same_data.refuse_shared(loader)
    if not isinstance(loader, DataLoader):
        return _Rows(loader)
    iterates_itself = type(loader).__iter__ is not DataLoader.__iter__
    if isinstance(loader.dataset, IterableDataset):
        return _Rows(loader) if iterates_itself or shares.is_auto else _Stream(loader, shares.first)
    has_batches = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
    if iterates_itself or (shares.is_auto and not has_batches):
        return _OwnIteration(loader, replicas)
    return _Indexed(loader, replicas, shares.first)


def _remade(loader: DataLoader[Any], collate: Callable[[Any], Any] | None, **sampling: Any) -> DataLoader[Any]:
    """Return a loader like the user's, with another sampler; batches come in order, so that shards belong together."""
    return DataLoader(
        loader.dataset, num_workers=loader.num_workers, collate_fn=collate, pin_memory=loader.pin_memory,
        timeout=loader.timeout, worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator, prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
        **sampling)


def _length(sized: Any) -> int | None:
    """Return a length, or None where there is none."""
    if not isinstance(sized, Sized):
        return None
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
