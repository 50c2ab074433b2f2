"""`elastic.run`: call a training function in one world after the other, until it has returned on all members.

Theory of operation (docs/protocol.md#members, #boundaries)
- A world ends with an error of a collective, with the launcher's order to stop, or at a boundary on which all members agree.
  Then this member closes its runtime, reports that, and waits for the next order.
- In the next world it goes back to its last commit if the order requires that, takes rank 0's state, and calls the function
  again.
- A loop that counts bodies goes on at the boundary before the body in which it was, if no optimizer of some member has begun
  a step since (docs/protocol.md#bodies).
- The function may return on some members before others. They wait for these, and call it again if there is another world.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from hvdlite import api
from hvdlite.bootstrap.admission import MissingRanks
from hvdlite.bootstrap.member_client import MemberClient
from hvdlite.core.errors import (
    ForkedProcessError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    LaunchError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    ReplicaMismatchError,
    WorldEnded,
)
from hvdlite.membership.messages import SaveState, StateReport, WorldOrder
from hvdlite.training.elastic.state import State

_log = logging.getLogger("hvdlite")


class _MeetingFailed(Exception):
    """The members of a world could not meet."""


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function such that it survives the loss of ranks, and takes new ones in.

    The function is called with the state, which is the same on all ranks, and goes on from there. It is called again, in
    another world, after a collective has failed or members have come or gone. Without an elastic launcher it is called once.
    When a script runs several functions, one after the other, ranks can be lost in each, and join in the first one only.

    The decorated function returns what the function returns, when it has returned on all ranks.

    Args:
        func: takes a state first, and any further arguments.

    Raises:
        TypeError: when the first argument is not a state.
        UnsupportedError: inside a function that `run` decorates.
        LaunchError: when the launcher is gone.
        ReplicaMismatchError: on all ranks, when they have synchronised their states and these are not equal.
    """
    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(state, "sync"):
            raise TypeError(f"the first argument of {getattr(func, '__name__', 'the function')}() must be an elastic state, "
                            f"such as hvd.elastic.ObjectState(epoch=0); it is a {type(state).__name__}")
        with api.worlds().elastic_run() as member:
            if member is None:
                _resume(state)
                state.sync()
                return func(state, *args, **kwargs)
            return _Training(member, state, lambda: func(state, *args, **kwargs)).run()
    return wrapper


def _resume(state: State) -> None:
    """Load a durable checkpoint, if the state has a directory of them."""
    durable = getattr(state, "_durable", None)
    if durable is not None:
        durable.resume()


class _Training:
    """One call of a decorated function in an elastic job.

    Args:
        call: calls the function.
    """

    def __init__(self, member: MemberClient, state: State, call: Callable[[], Any]) -> None:
        self._member, self._state, self._call = member, state, call
        self._worlds = api.worlds()
        self._has_state = not api.is_provisional()
        self._epoch = api.worlds().coordinates.epoch
        state._forget_bodies()
        if state._durable is not None:
            member.outlive_output()

    def run(self) -> Any:
        """Return what the function returns."""
        if not self._has_state:
            self._state.save()  # makes room for what rank 0 sends, while nobody waits for this member
        self._member.ready()
        order = None if self._has_state else self._next_order()
        while True:
            try:
                if order is not None:
                    self._enter(order)
                _resume(self._state)
                self._state.sync()
                self._has_state = True
                self._state._synchronized()
                self._member.saves_at_end = self._state._durable is not None
                result = self._call()
                self._member.saves_at_end = False
                if self._member.finish(self._epoch):
                    return result
                reason = "the world was stopped when the training function had returned on this rank"
            except (Exception, WorldEnded) as error:
                self._member.saves_at_end = False
                if self._member.is_ending or not self._ends_world(error):
                    raise
                reason = "" if self._member.is_at_rest else f"{type(error).__name__}: {error}".splitlines()[0]
                self._explain(error)
                error.__traceback__ = None  # the world's handles have this error, and its frames have the world's memory
            self._end_world(reason)
            order = self._next_order()

    def _enter(self, order: WorldOrder) -> None:
        self._epoch = order.epoch
        try:
            self._worlds.begin_world(order)
        except (LaunchError, ProtocolError, OSError) as error:
            self._member.meeting_failed(order.epoch, str(error), error.ranks if isinstance(error, MissingRanks) else ())
            raise _MeetingFailed(str(error)) from error
        if self._has_state:
            self._state._go_back(order)
        self._state.on_reset()

    def _ends_world(self, error: BaseException) -> bool:
        """Return whether an exception means that the world is over, and not the training.

        A framework may wrap the error of a collective in its own, so any exception counts when the runtime has failed, or
        this member has stopped at a boundary.
        """
        if isinstance(error, ReplicaMismatchError):  # a new world would bring it again
            return False
        if self._failure is not None or self._member.is_at_rest:
            return True
        if isinstance(error, (HostsUpdatedInterrupt, WorldEnded, _MeetingFailed)):
            return True
        return isinstance(error, HorovodInternalError) and not isinstance(error, (NotInitializedError, ForkedProcessError))

    def _end_world(self, reason: str) -> None:
        at_rest, failure = self._member.is_at_rest, self._failure
        self._worlds.end_world(reason or "members come or go", at_rest=at_rest)
        report = StateReport(has_state=self._has_state, at_rest=at_rest, is_behind=self._member.is_behind)
        report = self._state._stopped(report)
        self._member.idle(self._epoch, report, reason, failure.blamed if isinstance(failure, PeerLostError) else ())

    @property
    def _failure(self) -> HorovodInternalError | None:
        """What has ended the present world; None if nothing has."""
        return None if self._worlds.runtime is None else self._worlds.runtime.failure

    def _explain(self, error: BaseException) -> None:
        """Log why a world has ended on this rank, if nobody else does."""
        failure = self._failure
        if isinstance(error, (PeerLostError, HostsUpdatedInterrupt)) or (
                isinstance(failure, PeerLostError) and str(failure) in str(error)):  # TensorFlow wraps it in its own error
            return  # the launcher reports it
        _log.warning("world %d has ended on this rank: %s: %s", self._epoch, type(error).__name__, error,
                     exc_info=None if isinstance(error, _MeetingFailed) else error)

    def _next_order(self) -> WorldOrder:
        self._worlds.followers.collect()
        while isinstance(order := self._member.next_order(), SaveState):
            self._state._go_back(order)
            if self._state._durable is not None:
                self._state._durable.write_alone()
        return order
