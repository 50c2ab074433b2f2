"""States whose ranks compare digests first, so that rank 0 sends only what differs on some rank; see decision 38."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.elastic.state import ObjectState, pickled
from hvdlite.training.elastic.writers import names_of_writers, warn_of_writers
from hvdlite.training.objects import loads


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
    _writers: Sequence[str] = ()
    """Names of the writers that the function of `run` finds; empty in jobs that are not elastic."""

    def _note_writers(self, func: Callable[..., Any], *given: Any) -> None:
        """Note which writers exist before `run` calls a function; `sync` compares them with rank 0's."""
        self._writers = names_of_writers(self._kinds_of_writers(), func, *given)

    def _kinds_of_writers(self) -> tuple[type, ...]:
        """Return the framework's classes whose objects one rank makes, to write files."""
        return ()

    def _compare(self, states: dict[str, Part], attributes: dict[str, Part]) -> Comparison:
        """Compare this rank's parts with rank 0's; changes nothing.

        Args:
            states: parts that all ranks must have.
            attributes: parts that some ranks may lack.

        Raises:
            UnsupportedError: on all ranks, when something of rank 0 cannot be pickled.
            ValueError: when rank 0's state was made of other parts than this rank's.
        """
        runtime = api.runtime()
        is_root = runtime.world.rank == 0
        own = {**states, **attributes}
        position, parts = self._broadcast_parts(states, attributes)
        lacks = [not is_root and (name not in own or not own[name].equals(part, self._same_by_repr))
                 for name, part in parts.items()]
        everywhere = runtime.allgather("elastic.differs", np.array([lacks], np.uint8)).wait()
        return Comparison(position, parts, frozenset(itertools.compress(parts, lacks)),
                          frozenset(itertools.compress(parts, everywhere.any(axis=0))))

    def _broadcast_parts(self, states: dict[str, Part], attributes: dict[str, Part]
                         ) -> tuple[tuple[int, int | None], dict[str, Part]]:
        """Return rank 0's position, and its parts.

        Raises:
            UnsupportedError, ValueError: see `_compare`.
        """
        rank = api.runtime().world.rank
        sent: tuple[dict[str, bytes], ...] = ({}, {})
        refusal = ""
        try:
            if rank == 0:
                sent = tuple({name: pickled(name, part) for name, part in parts.items()} for parts in (states, attributes))
        except UnsupportedError as error:
            refusal = f"rank 0: {error}"
        names, position, sent, refusal, writers = self._bcast_object(
            (self._parts(), self._position(), sent, refusal, self._writers))
        if refusal:
            raise UnsupportedError(refusal)
        self._check_parts(names)
        if rank == 1:  # the next rank 0, if that is lost
            warn_of_writers(writers, self._writers)
        if sorted(sent[0]) != sorted(states):
            raise ValueError(f"rank 0's elastic state has {', '.join(sorted(sent[0])) or 'nothing'} with a state of its "
                             f"own, and rank {rank}'s has {', '.join(sorted(states)) or 'nothing'}: make the same state on "
                             "all ranks")
        if rank == 0:
            return position, {**states, **attributes}
        return position, {name: loads(part) for parts in sent for name, part in parts.items()}


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
