"""The order of samples on all ranks, which replica 0's sampler decides.

Replica 0 broadcasts its indices in chunks, ahead of what the workers of any rank ask for. So any sampler can be used, and
samples are shuffled as in one process. The other ranks' samplers advance too, so that their generators stay in step.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite.training.mirrored.shares import SharesPass

CHUNK = 8192
"""The least number of indices that are broadcast together."""
_END: Any = object()


class SynchronizedSampler:
    """Replaces a sampler in this rank's loader; other attributes are those of the sampler.

    Args:
        is_sharded: whether items are batches of indices of which each rank takes its shard.
        is_batched: whether items are batches of indices.
    """

    def __init__(self, sampler: Iterable[Any], replicas: ReplicaGroup, *, is_sharded: bool = False,
                 is_batched: bool = False) -> None:
        self.sampler = sampler
        self._replicas, self._is_sharded, self._is_batched = replicas, is_sharded, is_sharded or is_batched
        self._epoch: SamplerEpoch | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def begin(self, depth: int, shares: SharesPass) -> SamplerEpoch:
        """Begin an epoch; the next iteration is over its indices."""
        self._epoch = SamplerEpoch(self.sampler, self._replicas, depth, shares if self._is_sharded else None,
                                   self._is_batched)
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        assert self._epoch is not None
        return iter(self._epoch)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class SamplerEpoch:
    """One pass over replica 0's sampler.

    Args:
        shares: of the batches of which each rank takes its shard, if it does.

    Attributes:
        rows: of the global batches whose shards were asked for and not received yet.
        has_end: whether all indices are to be fetched as soon as the first one is asked for.
    """

    def __init__(self, sampler: Iterable[Any], replicas: ReplicaGroup, depth: int,
                 shares: SharesPass | None, is_batched: bool) -> None:
        self.rows: collections.deque[int] = collections.deque()
        self._sampler, self._replicas, self._depth = sampler, replicas, depth
        self._shares, self._is_batched = shares, is_batched
        self._own: Iterator[Any] | None = None  # not before the loader asks, as in one process
        self._waiting: collections.deque[Any] = collections.deque()
        self._fetched = 0
        self._is_over = False
        self.has_end = False

    def __iter__(self) -> Iterator[Any]:
        while self.has_end and not self._is_over:
            self._fetch()
        while True:
            if not self._waiting and not self._is_over:
                self._fetch()
            if not self._waiting:
                return
            indices = self._waiting.popleft()
            if self._shares is not None:
                self.rows.append(len(indices))
                indices = self._shares.taken(indices)
            yield indices

    def look_ahead(self, received: int) -> None:
        """Fetch what workers ask for after so many received batches.

        Workers of different ranks prefetch to different depths. All ranks fetch in the same step here, so that no rank waits
        for another one in a different step.
        """
        while not self._is_over and self._fetched <= received + self._depth:
            self._fetch()

    def _fetch(self) -> None:
        """Receive the next chunk from replica 0; replica 0 sends it."""
        if self._own is None:
            self._own = iter(self._sampler)
        error: BaseException | None = None
        chunk: list[Any] = []
        if self._replicas.replica_id == 0:
            try:
                self._is_over = self._draw(chunk)
            except Exception as raised:  # reported to all ranks
                error, self._is_over = raised, True
        text = f"{type(error).__name__}: {error}" if error is not None else ""
        chunk, self._is_over, text = self._replicas.broadcast_object((chunk, self._is_over, text), "indices")
        if error is not None:
            raise error
        if text:
            raise RuntimeError(f"replica 0's sampler raised {text}")
        if self._replicas.replica_id > 0:
            for _ in range(len(chunk) + self._is_over):
                next(self._own, None)
        self._waiting.extend(chunk)
        self._fetched += len(chunk)

    def _draw(self, chunk: list[Any]) -> bool:
        """Fill a chunk from this rank's sampler; return whether the sampler came to its end."""
        assert self._own is not None
        count = 0
        while len(chunk) <= self._depth or count < CHUNK:
            item = next(self._own, _END)
            if item is _END:
                return True
            if hasattr(item, "tolist"):  # a tensor or an array
                item = item.tolist()
            chunk.append(item)
            count += len(item) if self._is_batched else 1
        return False
