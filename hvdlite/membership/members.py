"""A member of an elastic job, as the authority knows it."""

from __future__ import annotations

import dataclasses
import enum
import math

from hvdlite.membership.messages import Standing


class Phase(enum.Enum):
    """Where a member is in its life."""

    STARTING = enum.auto()  # a joiner that is not at the entrance of elastic.run yet
    READY = enum.auto()  # a joiner that waits for its first world
    MEETING = enum.auto()
    RUNNING = enum.auto()  # it has met all others of its world
    FINISHED = enum.auto()  # its training function has returned
    IDLE = enum.auto()  # its world has ended on it
    DISMISSED = enum.auto()
    KILLED = enum.auto()  # what it says does not count any more
    GONE = enum.auto()


JOINING = (Phase.STARTING, Phase.READY)
IN_WORLD = (Phase.MEETING, Phase.RUNNING, Phase.FINISHED)


@dataclasses.dataclass
class Member:
    """A process of an elastic job.

    Attributes:
        is_ready: whether it has entered `elastic.run`, so that it survives the loss of others.
        standing: what it said when its last world ended on it; None before.
        boundary: its answer to the `PrepareStop` under way.
        deadline: when it is killed, if it has not done by then what it was told.
        answer_by: when it is killed, if it has not told by then what it was asked: its boundary, or whether it lives.
        ask_at: when it is asked whether it lives, because others wait for it.
        give_up_at: when it is killed if it has not stopped by then, though it lives.
        is_noted: whether the user has been told that the others wait for it.
        fault: why it was killed, if that is its own failure; "" if it was not, or if others are the reason.
    """

    id: int
    host: str
    slot: int
    phase: Phase
    is_ready: bool = False
    standing: Standing | None = None
    boundary: int | None = None
    deadline: float = math.inf
    answer_by: float = math.inf
    ask_at: float = math.inf
    give_up_at: float = math.inf
    is_noted: bool = False
    fault: str = ""

    def stopped(self) -> None:
        """It has done what it was told: nothing is expected any more."""
        self.deadline = self.answer_by = self.ask_at = self.give_up_at = math.inf
        self.is_noted = False
