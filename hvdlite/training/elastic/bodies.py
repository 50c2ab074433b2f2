"""The base of states, and where a state stands: commits, boundaries, and bodies of loops (docs/protocol.md#bodies).

A loop that counts bodies calls `_begin_body` before each body, and `_end_bodies` after the last one. Then these are the
boundaries, and a commit in a body is made at the next one, where the loop's position says that the body is done.

`state.checkpoint(directory)` makes durable checkpoints at boundaries (docs/elastic.md#checkpoints).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from hvdlite import api, boundaries
from hvdlite.core.errors import CheckpointError, HostsUpdatedInterrupt, UnsupportedError
from hvdlite.membership.events import TOO_FEW
from hvdlite.membership.messages import SaveState, StateReport, WorldOrder
from hvdlite.training import objects
from hvdlite.training.checkpoints.directory import Every
from hvdlite.training.checkpoints.loading import load
from hvdlite.training.checkpoints.ranks import Ranks
from hvdlite.training.checkpoints.saving import finish, refuse_missing_package, save_objects

_log = logging.getLogger("hvdlite")


class DurableCheckpoints:
    """Writes a state now and then, and loads it when a job begins.

    Args:
        directory: as in `hvd.save`.
        every: the time between two checkpoints.
        state: an `ObjectState`.

    Raises:
        ValueError: for an interval that is none.
        ImportError: without the package safetensors.
        UnsupportedError: for another state.
    """

    def __init__(self, directory: str | os.PathLike[str], every: str | float, state: Any) -> None:
        refuse_missing_package()
        state._durable_parts()
        self._directory, self._every, self._state = os.path.abspath(directory), Every(every), state
        self._is_new = True  # nobody has looked for a checkpoint yet

    def resume(self) -> None:
        """At the beginning of a world: load the newest checkpoint, if rank 0 has not looked for it yet; all ranks call this.

        Raises:
            CheckpointError, ValueError: as `hvd.load`.
            HorovodInternalError: when a rank is lost.
        """
        is_new = Ranks.present("resume").broadcast(self._is_new, 0)
        if is_new:
            others = load(self._directory, **self._state._durable_parts())
            if others is not None:
                self._state._assign(others)  # what cannot be loaded in place
                if api.rank() == 0:
                    print(f"hvdlite: training goes on from a checkpoint in {self._directory}", file=sys.stderr, flush=True)
        self._is_new = False

    def boundary(self) -> None:
        """At a boundary: write a checkpoint, if one is due on all ranks; in the background, if the job does not end.

        Raises:
            HorovodInternalError: when a rank is lost.
            SystemExit: on all ranks, when the job ends, or its launcher is lost.
        """
        member = api.worlds().member
        if not api.is_initialized() or api.is_provisional():
            return
        is_ending = member is not None and member.is_ending
        if self._every.is_due(is_ending):
            is_ending = any(Ranks.present("end").gather(is_ending))
            self._write(blocking=is_ending)
            if is_ending:
                raise SystemExit(TOO_FEW)

    def world_ends(self) -> None:
        """All ranks stop at a boundary, and the world still works: write the last checkpoint, if the job ends with it.

        What is being written in the background has to be complete before members leave.
        """
        finish()
        member = api.worlds().member
        if member is not None and member.is_last:
            self._write(blocking=True)

    def write_alone(self) -> None:
        """Write what this process has; there is no world. An error is logged."""
        try:
            self._write(blocking=True)
        except CheckpointError as error:
            _log.error("%s", error)

    def _write(self, *, blocking: bool) -> None:
        save_objects(self._directory, self._state._durable_parts(), blocking=blocking)


def _broadcast_object(value: Any) -> Any:
    return objects.broadcast_object(api.runtime(), value, 0, "elastic.state")


class State:
    """The base of states for `hvd.elastic.run`; has Horovod's names.

    A subclass defines `save`, `restore` and `sync`. Its `sync` calls this class's, which carries the position.

    Args:
        bcast_object: a function that returns rank 0's object on all ranks; default: hvdlite's own.
        get_rank: accepted for Horovod's sake.
    """

    _commits = 0
    """The number of the last commit that this state holds; 0 is the state with which training begins. Private, because
    scripts count their own commits in an attribute `commits`."""
    _boundaries = 0
    """How many boundaries were passed in this world since the last commit."""
    _body: int | None = None
    """The number, since the last commit, of the boundary at which a loop that counts bodies would go on; None before such a
    loop. Survives worlds."""
    _saved_body: int | None = None
    """That of the copy to which `restore` goes back."""
    _steps: Any = 0
    """What `_steps_so_far` was at that boundary."""
    _small: Any = None
    """A copy of the small things at that boundary; None if there is none."""
    _can_repeat_steps = False
    """Whether a body can be run again after its step, because each worker's parameters count (`outer=`)."""
    _in_body = False
    _is_commit_due = False
    _keeps_gradients = False
    """Whether gradients of a body without a step may be used in a later one; they are lost with a world."""
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
        """Add functions to call in each new world before the state is synchronised, to scale a learning rate for example.

        Args:
            callbacks: functions without parameters.
        """
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

    # --- bodies ------------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        self.save()
        self._commits, self._boundaries, self._is_commit_due = self._commits + 1, 0, False
        if self._body is not None:
            self._body, self._saved_body, self._small = 0, 0, None

    def _begin_body(self) -> None:
        """Pass the boundary before a body: members may come and go; if the world is lost, this body can be run again.

        Raises:
            HostsUpdatedInterrupt: Like `check_host_updates`.
            UnsupportedError: when an attribute cannot be copied, naming it.
        """
        is_counted = self._count_boundary()
        self._in_body = True
        self._give_way(is_counted=is_counted)

    def _end_bodies(self) -> None:
        """Pass the boundary after the last body; raises what `_begin_body` does."""
        is_counted = self._count_boundary()
        self._in_body = False
        self._give_way(is_counted=is_counted)

    def _count_boundary(self) -> bool:
        """Count, and copy the small things; return False where training would go on at the boundary before."""
        if self._is_commit_due:
            self._commit()
        elif self._in_body and self._keeps_gradients and self._steps == self._steps_so_far():
            return False  # gradients of this body may count in the next step
        else:
            self._body = (self._body or 0) + self._in_body
        self._copy_small()
        return True

    def _steps_so_far(self) -> Any:
        """Return something that changes when parameters do."""
        return api.worlds().steps_begun

    def _copy_small(self) -> None:
        self._steps, room, self._small = self._steps_so_far(), self._small, None
        if api.is_elastic():
            self._small = self._small_copy(room)

    def _small_copy(self, room: Any) -> Any:
        """Return a copy of what a body may change before an optimizer's step; None if this state cannot make one.

        Args:
            room: an older copy, which is not needed any more; or None.
        """

    def _load_small(self, small: Any) -> None:
        """Go back to a copy, which stays as it is."""

    def _position(self) -> tuple[int, int | None]:
        return self._commits, self._body

    def _take_position(self, position: tuple[int, int | None]) -> None:
        """Take rank 0's, with its state."""
        if tuple(position) != self._position():
            self._small = None  # it is of another boundary
        self._commits, self._body = position
        self._saved_body = self._body

    def _forget_bodies(self) -> None:
        """Another training begins."""
        self._body = self._saved_body = self._small = None

    def _synchronized(self) -> None:
        """The state is rank 0's: what follows can be undone like a body."""
        if self._body is not None:
            self._copy_small()

    def _go_back(self, order: WorldOrder | SaveState) -> None:
        """In a new world, go back to the last commit, or to the boundary at which rank 0 goes on, if this member has a copy.

        A member that has stepped since then gets rank 0's parameters when the state is synchronised.
        """
        if order.restore:
            self.restore()
            self._body, self._small = self._saved_body, None
        elif self._small is not None and self._position() == (order.commits, order.boundaries):
            self._load_small(self._small)

    def _stopped(self, report: StateReport) -> StateReport:
        """The world has ended; return a report with this state's position."""
        boundaries = self._boundaries if self._body is None else self._body
        has_parameters = self._can_repeat_steps or self._steps == self._steps_so_far()
        can_resume = self._small is not None and has_parameters and not report.is_behind
        self._boundaries, self._in_body, self._is_commit_due = 0, False, False
        return msgspec.structs.replace(report, commits=self._commits, boundaries=boundaries, can_resume=can_resume)
