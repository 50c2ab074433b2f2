"""States whose ranks compare digests first, so that rank 0 sends only what differs on some rank; see decision 38."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite import api
from hvdlite.training.elastic.state import ObjectState


@dataclasses.dataclass(eq=False)
class Part:
    """What an attribute of a state consists of.

    Attributes:
        structure: with placeholders for tensors.
        tensors: this rank's; they are not pickled.
        digests: of the tensors; None for one that cannot be compared.
    """

    structure: Any
    tensors: Sequence[Any] = ()
    digests: Sequence[int | None] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tensors": []}

    def equals(self, other: Part, plain: Collection[type]) -> bool:
        """Return whether another rank's part is the same, bit by bit; False also where they cannot be compared.

        Args:
            plain: types whose values are equal bit by bit if they have the same `repr`.
        """
        return (None not in self.digests and self.digests == other.digests
                and _is_same(self.structure, other.structure, plain))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What rank 0 has, and who lacks it.

    Attributes:
        position: rank 0's, for `_take_position`.
        parts: rank 0's parts by name, in the same order on all ranks; on the other ranks these have no tensors.
        lacking: the names of those that this rank does not have; none on rank 0.
        sent: the names of those that some rank does not have; the same on all ranks.
    """

    position: tuple[int, int | None]
    parts: dict[str, Part]
    lacking: frozenset[str]
    sent: frozenset[str]


class ComparedState(ObjectState):
    """A state with tensors; a subclass's `sync` sends those parts that ranks lack."""

    _same_by_repr: frozenset[type] = frozenset((bool, float, complex, str, bytes, type(None)))
    """Types whose values are equal bit by bit if they have the same `repr`."""

    def _compare(self, states: dict[str, Part], attributes: dict[str, Part]) -> Comparison:
        """Compare this rank's parts with rank 0's; changes nothing.

        Args:
            states: parts that all ranks must have.
            attributes: parts that some ranks may lack.

        Raises:
            UnsupportedError: on all ranks, when something of rank 0 cannot be pickled.
            ValueError: when rank 0's state was made of other parts than this rank's.
        """
        own, runtime = {**states, **attributes}, api.runtime()
        position, parts = self._of_root(own)
        lacks = [runtime.world.rank > 0 and not (name in own and own[name].equals(part, self._same_by_repr))
                 for name, part in parts.items()]
        everywhere = runtime.allgather("elastic.differs", np.array([lacks], np.uint8)).wait()
        return Comparison(position, parts, frozenset(itertools.compress(parts, lacks)),
                          frozenset(itertools.compress(parts, everywhere.any(axis=0))))


def _is_same(one: Any, other: Any, plain: Collection[type]) -> bool:
    """Compare structures of plain data, of the same types and in the same order."""
    kind = type(one)
    if kind is not type(other):
        return False
    if isinstance(one, Mapping):
        one, other = ([list(each), list(each.values()), getattr(each, "__dict__", None)]  # a subclass may have more
                      for each in (one, other))
        return _is_same(one, other, plain)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_is_same(*each, plain) for each in zip(one, other, strict=True))
    return bool(one == other) if kind is int else kind in plain and repr(one) == repr(other)
