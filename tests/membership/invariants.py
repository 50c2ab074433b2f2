"""What is always true of a job's members and their world."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from hvdlite.membership.expectations import NOTHING, Expected
from hvdlite.membership.members import IN_WORLD, JOINING, JobWorld, MemberState, WorldState

EXPECTED_IN: Final[Mapping[Expected, Collection[MemberState]]] = {
    "": set(MemberState) - {MemberState.DISMISSED},
    "stop": IN_WORLD,
    "boundary": (MemberState.TRAINING, MemberState.FINISHED),
    "life": (MemberState.OUTSIDE, MemberState.TRAINING),
    "exit": (MemberState.DISMISSED,),
}
"""The states in which something is expected of a member."""


def validate(world: JobWorld) -> None:
    """Check what is always true between two events."""
    waits = world.state in (WorldState.FOUNDING, WorldState.WAITING)
    assert world.state is WorldState.OVER or (world.until < math.inf) == waits, "it gives up only while it waits"
    slots = [(member.host, member.slot) for member in world.alive()]
    assert len(slots) == len(set(slots)), "a slot is taken twice"
    for member in world.everybody.values():
        state, wait = member.state, member.wait
        checks = (
            state in EXPECTED_IN[wait.what],
            wait == NOTHING or min(wait.kill_at, wait.ask_at) < math.inf or world.limits.heartbeat == math.inf,
            wait.what != "" or wait == NOTHING,
            not member.fault or state in (MemberState.KILLED, MemberState.GONE),
            state not in (*IN_WORLD, MemberState.IDLE) or member in world.members,
            state not in JOINING or member not in world.members,
            wait.what != "boundary" or world.state is WorldState.PREPARING,
            state not in (MemberState.FIRST_MEETING, MemberState.OUTSIDE, MemberState.MEETING)
            or world.state not in (WorldState.PREPARING, WorldState.STOPPING),
            state not in IN_WORLD or wait.what == "stop" or world.state not in (WorldState.ENDING, WorldState.WAITING),
            world.state is not WorldState.WAITING or member not in world.living()
            or state in (MemberState.IDLE, MemberState.KILLED),
            member.leave_by == math.inf or bool(member.notice), not world.is_last or world.state is not WorldState.WAITING)
        assert all(checks), f"{checks}: {member} in a world that is {world.state.name}"
