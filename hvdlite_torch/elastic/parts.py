"""The parts of a `TorchState` that `sync` compares, and sends only where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.replicas import digest
from hvdlite_torch.arrays.tensors import on_host
from hvdlite_torch.collectives.broadcasts import Placeholder, taken_out

_PLAIN = frozenset((bool, float, complex, str, bytes, type(None), torch.dtype, torch.device))
"""Types whose values are equal bit by bit if they have the same `repr`."""


class Digests:
    """Digests of tensors. Each is computed once, until `forget`."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[torch.Tensor, int | None]] = {}  # the tensors keep their addresses

    def of(self, name: str, value: Any) -> int | None:
        """Return the digest of a tensor; None for other objects, and for tensors that collectives do not carry."""
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided:
            return _digest(name, value)
        key = value.data_ptr(), value.device, value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
        if key not in self._known:
            self._known[key] = value, _digest(name, value)
        return self._known[key][1]

    def forget(self) -> None:
        """Tensors have changed."""
        self._known.clear()


class Part:
    """What an attribute consists of.

    Attributes:
        structure: with placeholders for tensors.
        tensors: this rank's; they are not pickled.
        digests: of the tensors; None for one that cannot be compared.
    """

    def __init__(self, name: str, value: Any, digests: Digests) -> None:
        self.tensors: list[torch.Tensor] = []
        self.structure = taken_out(value, self.tensors)
        self.digests = [digests.of(name, tensor) for tensor in self.tensors]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tensors": []}

    def equals(self, other: Part) -> bool:
        """Return whether another rank's part is the same, bit by bit; False also where that cannot be told."""
        return (None not in self.digests and self.digests == other.digests
                and _is_same(self.structure, other.structure))


def _digest(name: str, tensor: torch.Tensor) -> int | None:
    try:
        array: Array = on_host(tensor, name)
    except UnsupportedError:
        return None
    return digest(array)


def _is_same(one: Any, other: Any) -> bool:
    """Compare structures of plain data, of the same types and in the same order."""
    kind = type(one)
    if kind is not type(other):
        return False
    if isinstance(one, Mapping):
        more = (getattr(each, "__dict__", None) for each in (one, other))  # a subclass may have more than its items
        return (_is_same(*more) and _is_same(list(one), list(other))
                and _is_same(list(one.values()), list(other.values())))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if kind is Placeholder:
        return bool(vars(one) == vars(other))
    return bool(one == other) if kind is int else kind in _PLAIN and repr(one) == repr(other)
