"""The sampler whose position in an epoch survives changes of the world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from hvdlite import api
from hvdlite.training.positions import rank_share


class ElasticSampler(Sampler[int]):
    """Samples each rank's shard of the rest of an epoch; like Horovod's.

    Give it to `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch. The order of
    an epoch depends on seed and epoch only, and the position in it is the number of samples that all ranks together have
    processed; so the rest can be divided among any number of ranks. Ranks get equally many samples: the last ones wrap
    around.

    Args:
        dataset: of known length.
        shuffle: whether to shuffle.
        seed: of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0
        self.processed_num = 0  # by all ranks together, in this epoch
        self._goes_on = False  # the epoch has begun in another world, or before the state was loaded
        self._divide()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without processed samples.

        Directly after a change of the world, or after a state was loaded, the same epoch goes on where it was instead. So
        this may be called at the beginning of an epoch, too.

        Args:
            epoch: decides the order of samples, together with the seed.
        """
        if epoch != self.epoch or not self._goes_on:
            self.processed_num = 0
        self.epoch, self._goes_on = epoch, False
        self._divide()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of this many samples.

        Args:
            batch_idx: accepted for Horovod's sake.
            batch_size: samples of each rank's batch.
        """
        del batch_idx
        self._goes_on = False
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has processed the next samples of its shard, and every other rank as many.

        Args:
            indices: of the data set, in the order in which the sampler gave them.

        Raises:
            ValueError: for samples that are not the next ones, because the position is a number.
        """
        given = sorted(int(index) for index in indices)
        begin = (self.processed_num - self._divided_at) // self.num_replicas
        if given != sorted(self.indices[begin:begin + len(given)]):
            raise ValueError(f"samples {given[:8]} are not the next {len(given)} of rank {self.rank}: "
                             f"{self.indices[begin:begin + min(8, len(given))]}. Record batches in the order of the sampler")
        self.record_batch(0, len(given))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of this rank's batch `batch_idx`.

        Args:
            batch_idx: its number since the position was last changed, from 0.
            batch_size: samples of a batch of this rank.
        """
        start = batch_idx * batch_size
        return self.indices[start:start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the epoch can be continued."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, with the current number of ranks.

        Args:
            state_dict: what `state_dict` has returned on any number of ranks.
        """
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks; iterations that have begun are not affected."""
        self._goes_on = self.processed_num > 0
        self._divide()

    def _divide(self) -> None:
        self.num_replicas, self.rank = api.size(), api.rank()
        self._divided_at = self.processed_num
        length = len(self.dataset)
        if self.shuffle:
            order = torch.randperm(length, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        else:
            order = list(range(length))
        self.remaining_indices: list[int] = order[self.processed_num:]
        self.indices = rank_share(self.remaining_indices, 0, self.rank, self.num_replicas)
        self.num_samples = len(self.indices)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices."""
        return iter(self.indices)

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return self.num_samples
