"""The state of an elastic training: what a commit saves, what a failure restores, and what new members receive.

A commit never destroys the one before it: everything is copied first, and then replaces the older commit at once. So a
copy that fails (no memory, an object that cannot be copied) leaves the last commit whole.

Ranks of a state with tensors compare digests first, so that rank 0 sends only what differs on some rank; see decision 38.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError, ReplicaMismatchError, UnsupportedError
from hvdlite.training import objects
from hvdlite.training.checkpoints import kinds
from hvdlite.training.elastic.bodies import State
from hvdlite.training.replicas import check_replicas, named_parts

__all__ = ["ObjectState", "State", "explained", "pickled"]

_UNEQUAL = ("The ranks have just synchronised their states, so a class of the script changes what it is sent by its rank, "
            "or memory is corrupt. Keep what differs between ranks in an attribute whose name begins with an underscore")

_SHARED = (bool, int, float, complex, str, bytes, type(None))
"""Types of values that need no copy."""


class ObjectState(State):
    """A state of attributes, which are plain Python objects.

    `commit` and `restore` copy them deeply; `sync` sends rank 0's. Plain data (numbers, strings, arrays, and containers of
    these) that is assigned to another public attribute later belongs to the state, too.

    Args:
        bcast_object, get_rank: as in `State`.
        kwargs: the attributes.

    Raises:
        UnsupportedError: when an attribute cannot be copied or pickled, naming it.
        ValueError: for the name of a method.
    """

    _plain: tuple[type, ...] = (*_SHARED, np.generic, np.ndarray)
    _not_state: frozenset[str] = frozenset()
    """Public attributes that are not sent and saved as objects."""

    def __init__(self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None,
                 **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        reserved = sorted(name for name in kwargs if hasattr(type(self), name))
        if reserved:
            raise ValueError(f"the elastic state needs the name {reserved[0]} itself; call the attribute something else")
        self._tracked = frozenset(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        for name, value in self._attributes().items():
            pickled(name, value)
        self._saved = self._copied()

    def save(self) -> None:
        """Copy all attributes."""
        self._saved = self._copied()

    def restore(self) -> None:
        """Go back to the attributes of the last `save` or `sync`; the saved ones stay as they are."""
        self._assign(copied(self._saved))

    def sync(self) -> None:
        """Take rank 0's attributes, and save them.

        Raises:
            UnsupportedError: on all ranks, when one of rank 0's attributes cannot be pickled.
            ValueError: when rank 0's state was made of other parts than this rank's.
            ReplicaMismatchError: on all ranks, when the states are not equal afterwards.
        """
        position, attributes = self._of_root(self._attributes())
        self._assign(attributes)
        self._take_position(position)
        ObjectState.save(self)
        self._check_replicas(self._replicated(attributes))

    def _of_root(self, parts: Mapping[str, Any]) -> tuple[tuple[int, int | None], dict[str, Any]]:
        """Return rank 0's position, and its parts by name: on the other ranks copies.

        Args:
            parts: this rank's.

        Raises:
            UnsupportedError, ValueError: see `sync`.
        """
        own, rank = self._parts(), api.rank() if api.is_initialized() else "?"
        sent, refusal = {}, ""
        try:
            if rank in (0, "?"):
                sent = {name: pickled(name, part) for name, part in parts.items()}
        except UnsupportedError as error:
            refusal = f"rank 0: {error}"
        root, position, sent, refusal = self._bcast_object((own, self._position(), sent, refusal))
        if refusal:
            raise UnsupportedError(refusal)
        if own != root:
            raise ValueError(f"rank 0's elastic state has {', '.join(root) or 'nothing'}, and rank {rank}'s has "
                             f"{', '.join(own) or 'nothing'}: make the same state on all ranks")
        if rank == 0:
            return position, dict(parts)
        return position, {name: objects.loads(part) for name, part in sent.items()}

    def _small_copy(self, room: Any) -> Any:
        return self._copied(), kinds.all_random_states()

    def _load_small(self, small: Any) -> None:
        attributes, generators = small
        self._assign(copied(attributes))
        kinds.set_all_random_states(generators)

    def _parts(self) -> list[str]:
        """Return what the state was made of, for people and to compare it between ranks."""
        return sorted(name for name in self._tracked if name[:1] != "_")

    def _durable_parts(self) -> dict[str, Any]:
        return self._attributes()

    def _attributes(self) -> dict[str, Any]:
        """Return what belongs to the state, by name."""
        return {name: value for name, value in vars(self).items()
                if name in self._tracked
                or (name[:1] != "_" and name not in self._not_state and self._is_plain(value))}

    def _check_replicas(self, replicated: Iterable[tuple[str, Array | int]]) -> None:
        """Compare what `sync` has made equal, from `_replicated`, over all ranks (docs/protocol.md#equal-replicas)."""
        runtime = api.runtime() if api.is_initialized() and not api.is_provisional() else None
        if runtime is None or runtime.world.size == 1:
            return
        try:
            named = sorted(replicated, key=lambda part: part[0])
            check_replicas(runtime, named, "elastic.replicas", advice=_UNEQUAL)
        except ReplicaMismatchError:
            with contextlib.suppress(HorovodInternalError):
                runtime.barrier("elastic.replicas.known").wait()  # this rank may end: the others need the reason before that
            raise

    def _replicated(self, sent: Collection[str]) -> Iterator[tuple[str, Array | int]]:
        """Yield what `sync` makes equal on all ranks, as arrays (or their digests) with names.

        Args:
            sent: the attributes that rank 0 has sent; other ranks may have more.
        """
        return named_parts("state", {name: getattr(self, name) for name in sent}, lambda name, value: None)

    def _is_plain(self, value: Any) -> bool:
        if isinstance(value, dict):
            return all(self._is_plain(each) for each in value.values())
        if isinstance(value, (list, tuple, set, frozenset)):
            return all(map(self._is_plain, value))
        return isinstance(value, self._plain)

    def _copied(self) -> dict[str, Any]:
        return copied(self._attributes())

    def _assign(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return deep copies; objects that several attributes share are copied once."""
    memo: dict[int, Any] = {}
    copies = {}
    for name, value in attributes.items():
        with explained(name, value, "copied"):
            copies[name] = value if type(value) in _SHARED else copy.deepcopy(value, memo)
    return copies


def pickled(name: str, value: Any) -> bytes:
    """Return an attribute as bytes.

    Raises:
        UnsupportedError: when it cannot be pickled, naming it.
    """
    with explained(name, value, "pickled"):
        return objects.dumps(value)


@contextlib.contextmanager
def explained(name: str, value: Any, verb: str, *others: type[Exception]) -> Iterator[None]:
    """Return a context in which an attribute is copied or pickled; an error of any kind names it, but for lack of memory.

    Args:
        others: errors that are raised as they are, too.

    Raises:
        UnsupportedError: when that cannot be done.
    """
    try:
        yield
    except Exception as error:  # of any kind: the object's own methods are called
        if isinstance(error, (MemoryError, *others)):
            raise
        raise UnsupportedError(
            f"attribute '{name}' of the elastic state cannot be {verb}: it is a {type(value).__name__} "
            f"({type(error).__name__}: {error}). Keep plain data in the state, and such an object outside of it or in an "
            "attribute whose name begins with an underscore") from error


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

    def _compare(self, states: dict[str, Part], attributes: dict[str, Part], kept: Collection[str] = ()) -> Comparison:
        """Compare this rank's parts with rank 0's; changes nothing.

        Args:
            states: parts that all ranks must have.
            attributes: parts that some ranks may lack.
            kept: those that this rank keeps as they are.

        Raises:
            UnsupportedError: on all ranks, when something of rank 0 cannot be pickled.
            ValueError: when rank 0's state was made of other parts than this rank's.
        """
        own, runtime = {**states, **attributes}, api.runtime()
        position, parts = self._of_root(own)
        lacks = [runtime.world.rank > 0 and name not in kept
                 and not (name in own and own[name].equals(part, self._same_by_repr)) for name, part in parts.items()]
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
