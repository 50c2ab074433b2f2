"""The state of an elastic training: what a commit saves, what a failure restores, and what new members receive.

A commit never destroys the one before it: everything is copied first, and then replaces the older commit at once. So a
copy that fails (no memory, an object that cannot be copied) leaves the last commit whole.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdlite import api, boundaries
from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError, HostsUpdatedInterrupt, ReplicaMismatchError, UnsupportedError
from hvdlite.training import objects
from hvdlite.training.checkpoints import kinds
from hvdlite.training.elastic.bodies import CountedBodies
from hvdlite.training.elastic.durable import DurableCheckpoints
from hvdlite.training.replicas import check_replicas, named_parts

_UNEQUAL = ("The ranks have just synchronised their states, so a class of the script changes what it is sent by its rank, "
            "or memory is corrupt. Keep what differs between ranks in an attribute whose name begins with an underscore")

_SHARED = (bool, int, float, complex, str, bytes, type(None))
"""Types of values that need no copy."""


def _broadcast_object(value: Any) -> Any:
    return objects.broadcast_object(api.runtime(), value, 0, "elastic.state")


class State(CountedBodies):
    """The base of states for `hvd.elastic.run`; has Horovod's names.

    A subclass defines `save`, `restore` and `sync`. Its `sync` calls this class's, which carries the position.

    Args:
        bcast_object: a function that returns rank 0's object on all ranks; default: hvdlite's own.
        get_rank: accepted for Horovod's sake.
    """

    _durable: DurableCheckpoints | None = None
    _reset_callbacks: tuple[Callable[[], object], ...] = ()
    _bcast_object: Callable[[Any], Any] = staticmethod(_broadcast_object)

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any:
            """Return an attribute that the script has given the state; for type checkers."""

        def __setattr__(self, name: str, value: Any) -> None:
            """Change one."""

    def __init__(self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None) -> None:
        del get_rank
        if bcast_object is not None:
            self._bcast_object = bcast_object

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Add functions to call in each new world before the state is synchronised, to scale a learning rate for example."""
        self._reset_callbacks = (*self._reset_callbacks, *callbacks)

    def on_reset(self) -> None:
        """Adapt to a new world: `reset`, then the callbacks in the order in which they were registered."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Called when members come or go, before `HostsUpdatedInterrupt` is raised; for subclasses.

        Args:
            timestamp: in seconds since 1970.
            update_res: Horovod's flags: 1 removed, 2 added. It is always 3 here.
        """

    def commit(self) -> None:
        """Save the state, to which all ranks go back after a failure; then do what `check_host_updates` does.

        Call it on all ranks at the same points of the training, after an optimizer's step and not in the middle of one.

        Raises:
            HostsUpdatedInterrupt: on all ranks at the same commit, when members come or go.
        """
        if self._in_body:
            self._is_commit_due = True
            return
        self._commit()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Give way to a change of members without saving; costs nothing if there is none.

        Raises:
            HostsUpdatedInterrupt: on all ranks at the same call, when members come or go. `hvd.elastic.run` handles it.
        """
        if not self._in_body:
            self._forget_bodies()  # of a loop before this one
            self._boundaries += 1
            self._give_way()

    def checkpoint(self, directory: str | os.PathLike[str], every: str | float = "10 min") -> None:
        """Write durable checkpoints of this state, at boundaries and in the background; see `hvd.save`.

        Call it before the training function, on all ranks. When `run` begins, a job goes on from the newest whole checkpoint
        in the directory, with any number of ranks.

        Args:
            directory: one that all hosts share, or one on each host.
            every: the time between two checkpoints: seconds, or such as "90 s", "10 min", "2 h".

        Raises:
            ImportError: without the package safetensors.
            UnsupportedError: for a state of the script's own class, whose parts are not known.
            ValueError: for an interval that is none.
        """
        self._durable = DurableCheckpoints(directory, every, self)

    def _save_alone(self) -> None:
        """No world has this state any more, and this process waits for others: write it to the disk."""
        if self._durable is not None:
            self._durable.write_alone()

    def _durable_parts(self) -> dict[str, Any]:
        """Return what belongs to the state, by name: objects that `hvd.save` knows."""
        raise UnsupportedError(f"what belongs to a {type(self).__name__} is not known, so no checkpoint of it can be "
                               "written; call hvd.save in the training function")

    def _give_way(self, *, is_counted: bool = True) -> None:
        try:
            boundaries.boundary()
            if self._durable is not None and is_counted:
                self._durable.boundary()
        except HostsUpdatedInterrupt:
            if self._durable is not None:
                if not is_counted and self._small is not None:
                    self._load_small(self._small)  # as at the beginning of another world
                self._durable.world_ends()
            self.on_hosts_updated(time.time(), 3)
            raise

    def save(self) -> None:
        """Copy the state, such that `restore` can go back to it."""
        raise NotImplementedError(f"{type(self).__name__} does not define save()")

    def restore(self) -> None:
        """Go back to the last `save` or `sync`."""
        raise NotImplementedError(f"{type(self).__name__} does not define restore()")

    def sync(self) -> None:
        """Take rank 0's state on all ranks, and save it."""
        self._take_position(self._bcast_object(self._position()))

    def reset(self) -> None:
        """Adapt to the ranks of a new world; called by `on_reset`."""


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
        sent, refusal, has_runtime = {}, "", api.is_initialized()
        try:
            if not has_runtime or api.rank() == 0:
                sent = {name: pickled(name, part) for name, part in parts.items()}
        except UnsupportedError as error:
            refusal = f"rank 0: {error}"
        own = self._parts()
        root, position, sent, refusal = self._bcast_object((own, self._position(), sent, refusal))
        if refusal:
            raise UnsupportedError(refusal)
        if own != root:
            raise ValueError(f"rank 0's elastic state has {', '.join(root) or 'nothing'}, and rank "
                             f"{api.rank() if has_runtime else '?'}'s has {', '.join(own) or 'nothing'}: make the same state "
                             "on all ranks")
        if has_runtime and api.rank() == 0:
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
