"""The check that all ranks iterate over the same data, which a distributed loader then splits.

| what is found | result |
|---|---|
| a sampler or a Hugging Face dataset that splits samples among ranks | `ValueError` in `strategy.distribute` |
| `torch.utils.data.Subset` with other indices (`random_split` without a seed) | `MismatchError` on all ranks |
| whole first batches that have nothing in common | a warning: random augmentation looks the same |
| different fingerprints of a map-style Hugging Face dataset | a warning: fingerprints can be random |
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, Subset

from hvdlite.core.errors import MismatchError
from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite_torch.rows import leaves

_COUNTS = ("num_replicas", "_num_replicas", "world_size", "_world_size")
"""Attributes with the number of ranks among which a sampler splits samples (torch's, timm's, detectron2's)."""


def refuse_shared(loader: Any) -> None:
    """Raise `ValueError` for a loader that already splits samples among ranks."""
    for part in _parts(loader):
        if _ranks(part) > 1:
            raise ValueError(
                f"the loader's {type(part).__name__} already splits the samples among {_ranks(part)} ranks. Give "
                "strategy.distribute a loader over all samples with the global batch size (shuffle=True, or a sampler for "
                "one process; no split_dataset_by_node), or iterate over this loader itself, without strategy.distribute")


def subset(dataset: Any) -> dict[str, str]:
    """Return a digest of the indices that a `Subset` selects, which must be equal on all ranks; empty for other datasets."""
    digest = None
    while isinstance(dataset, Subset):
        digest = digest or hashlib.blake2b(digest_size=8)
        digest.update(np.asarray(dataset.indices).tobytes())
        dataset = dataset.dataset
    return {} if digest is None else {"indices of the Subset (seed random_split alike on all ranks)": digest.hexdigest()}


def signature(samples: list[Any]) -> list[str]:
    """Return a digest for each leaf in the structure of a batch's samples, or of one whole batch."""
    digests: list[Any] = []
    for sample in samples:
        for index, leaf in enumerate(leaves(sample)):
            if index == len(digests):
                digests.append(hashlib.blake2b(digest_size=8))
            digests[index].update(_content(leaf))
    return [digest.hexdigest() for digest in digests]


def compare(replicas: ReplicaGroup, seen: list[str] | None) -> None:
    """Warn when the first batches of all ranks have nothing in common; all ranks call this together.

    Args:
        seen: the `signature` of this rank's batch; None without a batch.

    Raises:
        MismatchError: on all ranks, when only some have a batch.
    """
    everywhere = replicas.allgather_object(seen, "first")
    without = [replica_id for replica_id, theirs in enumerate(everywhere) if theirs is None]
    if without and len(without) < len(everywhere):
        raise MismatchError(f"replica {without[0]} has no batch, but others have: all ranks must iterate over the same "
                            f"data, of which each takes its shard{_ADVICE}")
    if without or not all(everywhere) or any(len(set(place)) == 1 for place in zip(*everywhere, strict=False)):
        return
    warnings.warn("the first batches of the ranks have nothing in common, but each rank takes its shard of the same global "
                  f"batch: the others' samples are lost{_ADVICE}. Batches with random augmentation and without labels look "
                  "the same; then seed it alike, or filter this warning", stacklevel=2)


def fingerprint(loader: Any) -> str | None:
    """Return the fingerprint of a Hugging Face dataset; None for other datasets."""
    found = [vars(part).get("_fingerprint") for part in _parts(loader) if hasattr(part, "__dict__")]
    return next((each for each in found if isinstance(each, str)), None)


def compare_fingerprints(fingerprints: list[str | None]) -> None:
    """Warn when ranks have datasets with different fingerprints."""
    if len(set(fingerprints)) > 1:
        warnings.warn("the datasets of the ranks have different fingerprints, but ranks take shards of the same indices: "
                      f"the others' samples are lost{_ADVICE}. After a transform that cannot be hashed the fingerprint is "
                      "random; then filter this warning", stacklevel=2)


_ADVICE = (". Seed the dataset alike on all ranks, and leave out what splits it by rank (split_by_node, hvd.rank(), "
           "split_dataset_by_node), or iterate over it without strategy.distribute")


def _parts(loader: Any) -> Iterator[Any]:
    """Yield a loader, its samplers and its datasets, including wrapped ones."""
    seen: list[Any] = []
    waiting = [loader]
    while waiting and len(seen) < 16:
        part = waiting.pop()
        if part is None or any(part is other for other in seen):
            continue
        seen.append(part)
        yield part
        members = vars(part) if hasattr(part, "__dict__") else {}
        waiting += [members.get(name) for name in ("sampler", "batch_sampler", "dataset")]


def _ranks(part: Any) -> int:
    """Return the number of ranks among which a sampler or dataset splits samples."""
    members = {**(vars(part) if hasattr(part, "__dict__") else {})}
    if isinstance(part, Sampler):  # also what it computes
        members.update((name, getattr(part, name, None)) for name in ("rank", *_COUNTS) if name not in members)
    by_node = members.get("_distributed")  # of an IterableDataset of Hugging Face, after split_dataset_by_node
    counts = [getattr(by_node, "world_size", 1)]
    if members.get("rank", members.get("_rank")) is not None:
        counts += [members.get(name) for name in _COUNTS]
    return max([1, *(count for count in counts if isinstance(count, int))])


def _content(leaf: Any) -> bytes:
    """Return the bytes that identify a leaf; none for objects of unknown types."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_quantized:
            return b""
        leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.tobytes()
    return repr(leaf).encode() if isinstance(leaf, (str, bytes, int, float)) else b""
