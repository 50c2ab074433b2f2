"""A member of an elastic job, as the authority knows it."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Final

from hvdlite.membership.messages import Standing


class Phase(enum.Enum):
    """Where a member is in its life."""

    STARTING = enum.auto()  # a joiner that is not at the entrance of elastic.run yet
    READY = enum.auto()  # a joiner that waits for its first world
    FIRST_MEETING = enum.auto()  # a founder that meets the others of world 1, in init()
    MEETING = enum.auto()  # it meets the others of a later world, in elastic.run
    OUTSIDE = enum.auto()  # it has met all others of its world, and is not in elastic.run
    TRAINING = enum.auto()  # it has met them, and is in elastic.run
    FINISHED = enum.auto()  # its training function has returned
    IDLE = enum.auto()  # its world has ended on it
    DISMISSED = enum.auto()
    KILLED = enum.auto()  # what it says does not count any more
    GONE = enum.auto()


JOINING = (Phase.STARTING, Phase.READY)
IN_WORLD = (Phase.FIRST_MEETING, Phase.MEETING, Phase.OUTSIDE, Phase.TRAINING, Phase.FINISHED)
HAVE_MET = (Phase.OUTSIDE, Phase.TRAINING, Phase.FINISHED)
SURVIVING = (Phase.READY, Phase.MEETING, Phase.TRAINING, Phase.FINISHED, Phase.IDLE)
"""Those in `elastic.run`: they go on in another world when others are lost."""


STOP: Final = "stop"
BOUNDARY: Final = "boundary"
LIFE: Final = "life"
EXIT: Final = "exit"


@dataclasses.dataclass(frozen=True)
class Wait:
    """What a member is expected to do, and until when.

    Attributes:
        what: to `STOP`, to tell its `BOUNDARY`, to show `LIFE` because others wait for it, to `EXIT`; "": nothing.
        kill_at: when it is killed, if it has not done so.
        ask_at: when it is asked whether it lives.
        give_up_at: when it is killed though it lives.
        is_noted: whether the user has been told that others wait for it.
    """

    what: str = ""
    kill_at: float = math.inf
    ask_at: float = math.inf
    give_up_at: float = math.inf
    is_noted: bool = False


NOTHING: Final = Wait()


@dataclasses.dataclass
class Member:
    """A process of an elastic job.

    Attributes:
        standing: what it said when its last world ended on it; None before.
        boundary: its answer to the `PrepareStop` under way.
        wait: what it is expected to do.
        fault: why it was killed, if that is its own failure; "" if it was not, or if others are the reason.
    """

    id: int
    host: str
    slot: int
    phase: Phase
    standing: Standing | None = None
    boundary: int | None = None
    wait: Wait = NOTHING
    fault: str = ""

    @property
    def survives(self) -> bool:
        """Whether it goes on when others are lost."""
        return self.phase in SURVIVING
