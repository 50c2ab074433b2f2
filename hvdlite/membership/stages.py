"""Where the current world of an elastic job is; see `membership.worlds`."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """Where the current world is."""

    FOUNDING = enum.auto()  # too few slots so far
    MEETING = enum.auto()  # until all members have met
    RUNNING = enum.auto()
    PREPARING = enum.auto()
    STOPPING = enum.auto()
    ENDING = enum.auto()
    WAITING = enum.auto()  # too few members, all idle, wait for others
    FINISHED = enum.auto()  # elastic.run has returned on all members; it may be called again
    OVER = enum.auto()


IN_FORCE = (Stage.MEETING, Stage.RUNNING, Stage.PREPARING, Stage.STOPPING)
