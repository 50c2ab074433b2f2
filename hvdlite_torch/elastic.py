"""Samplers that record the progress of an epoch. (Elastic training itself is not implemented.)"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from hvdlite import api


class ElasticSampler(Sampler[int]):
    """Samples each rank's shard of the rest of an epoch; like Horovod's.

    Call `set_epoch` at the end of each epoch, and `record_batch` after each batch. Processed samples are skipped when the
    sampler is reset or its state is loaded, with any number of ranks. Ranks get equally many samples: the last ones wrap
    around.

    Args:
        dataset: of known length.
        shuffle: in an order that depends on seed and epoch only.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0
        self.processed_num = 0  # by all ranks together, in this epoch
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without processed samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of this many samples."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of this rank's batch `batch_idx`."""
        start = batch_idx * batch_size
        return self.indices[start:start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the epoch can be continued."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, with the current number of ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.num_replicas, self.rank = api.size(), api.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        self.remaining_indices = order[self.processed_num:]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        wanted = self.num_samples * self.num_replicas
        padded = self.remaining_indices
        while padded and len(padded) < wanted:
            padded = padded + padded[:wanted - len(padded)]
        self.indices = padded[self.rank:wanted:self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices."""
        return iter(self.indices)

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return self.num_samples
