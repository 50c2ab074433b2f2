"""The rows of a batch: division of a structure of tensors into shards.

A batch is a tensor or an array, or a dict, list or tuple of them, at any depth. Each tensor has a row for each sample; one
without dimensions has none, and stays whole. Lists and tuples of strings with as many entries as there are rows have an
entry for each sample (torch's default_collate makes them). Everything else stays whole, also lists of numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch


def rows_of(batch: Any) -> int:
    """Return the number of samples of a batch: the length of the first tensor or array in it.

    Raises:
        TypeError: when there is none.
        ValueError: for a list that may contain images.
    """
    _refuse_lists_of_images(batch)
    for leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0:
            return int(leaf.shape[0])
    raise TypeError(f"a batch of type {type(batch).__name__} cannot be split among ranks: there is no tensor in it "
                    "whose first dimension counts samples. Distribute a DataLoader over single samples, or batches made of "
                    "tensors, arrays, dicts, lists and tuples")


def rows_taken(batch: Any, count: int, rows: slice) -> Any:
    """Return some samples of a batch of `count`; scalars and values that are not tensors stay whole.

    Raises:
        ValueError: for a tensor of another length.
    """
    def taken(leaf: Any) -> Any:
        if not isinstance(leaf, (torch.Tensor, np.ndarray)) or leaf.ndim == 0:
            return leaf
        if leaf.shape[0] != count:
            raise ValueError(f"a batch has tensors of {count} and of {leaf.shape[0]} rows: it cannot be split among ranks")
        return leaf[rows]

    def of_samples(values: list[Any] | tuple[Any, ...]) -> Any:
        """Lists of strings with an entry a sample, such as file names, are split too."""
        texts = all(isinstance(each, (str, bytes)) for each in values)
        return values[rows] if texts and len(values) == count else None

    return mapped(batch, taken, of_samples)


def mapped(value: Any, change: Callable[[Any], Any], whole: Callable[[Any], Any] = lambda values: None) -> Any:
    """Return a structure with every leaf changed.

    Args:
        whole: called first with every list and tuple; returns a replacement, or None to change its leaves.
    """
    if isinstance(value, Mapping):
        changed = {key: mapped(item, change, whole) for key, item in value.items()}
        if type(value) is dict:
            return changed
        if not isinstance(value, MutableMapping):
            return type(value)(changed)  # type: ignore[call-arg]
        result = copy.copy(value)  # with what else there is, such as a factory of defaults
        for key, item in changed.items():  # not `update`, which adds the counts of a Counter
            result[key] = item
        return result
    if isinstance(value, (list, tuple)):
        instead = whole(value)
        if instead is not None:
            return instead
        items = [mapped(item, change, whole) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a structure of dicts, lists and tuples."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors among the leaves of a structure."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def _refuse_lists_of_images(value: Any) -> None:
    """Raise `ValueError` for a list that may or may not have an entry for each sample."""
    if isinstance(value, Mapping):
        for item in value.values():
            _refuse_lists_of_images(item)
    elif isinstance(value, (list, tuple)):
        images = all(isinstance(item, (torch.Tensor, np.ndarray)) and item.ndim == 3 for item in value)
        if isinstance(value, list) and len(value) > 1 and images and len({str(item.dtype) for item in value}) == 1:
            raise ValueError(
                f"a batch has a list of {len(value)} tensors with 3 dimensions, such as {list(value[0].shape)}. If these "
                "are images, one for each sample, stack them into one tensor, or distribute a DataLoader over single "
                "samples; if each of them has a row for each sample, make it a tuple or a dict")
        for item in value:
            _refuse_lists_of_images(item)
