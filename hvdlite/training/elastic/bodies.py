"""Where a state stands: commits, boundaries, and the bodies of loops that count them (docs/protocol.md#bodies).

A loop that counts bodies calls `_begin_body` before each body, and `_end_bodies` after the last one. Then these are the
boundaries, and a commit in a body is made at the next one, where the loop's position says that the body is done.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hvdlite import api
from hvdlite.membership.messages import SaveState, StateReport, WorldOrder


class CountedBodies:
    """The part of a state that counts; its names are private, because scripts give states attributes of their own."""

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
    _in_body = False
    _is_commit_due = False
    _keeps_gradients = False
    """Whether gradients of a body without a step may be used in a later one; they are lost with a world."""

    def save(self) -> None:
        """See `State`."""
        raise NotImplementedError

    def restore(self) -> None:
        """See `State`."""
        raise NotImplementedError

    def _give_way(self, *, is_counted: bool = True) -> None:
        """Let members come and go, at a boundary at which training goes on, or (if it is not counted) at the one before.

        Raises:
            HostsUpdatedInterrupt: Like `State.check_host_updates`.
        """
        raise NotImplementedError

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
        can_resume = self._small is not None and self._steps == self._steps_so_far() and not report.is_behind
        self._boundaries, self._in_body, self._is_commit_due = 0, False, False
        return msgspec.structs.replace(report, commits=self._commits, boundaries=boundaries, can_resume=can_resume)
