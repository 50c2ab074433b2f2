"""Members for which others wait: when they are asked whether they live, and killed (docs/protocol.md#boundaries). Pure.

A member that was told to stop may compute for some time; one for which others wait at a boundary, at the end of
`elastic.run` or in front of the next one may compute for as long as it likes. A stopped process would hold them up for ever:
they are in no collective with it, so none of them misses it. The link's thread answers whatever the script computes.
"""

from __future__ import annotations

import dataclasses

from hvdlite.membership.limits import Limits
from hvdlite.membership.members import LIFE, NOTHING, STOP, Member, Phase, Wait
from hvdlite.membership.roster import Roster
from hvdlite.membership.stages import Stage


class Awaited:
    """Asks the members for which others wait.

    Args:
        limits: the times.
        roster: the members; each has its own clock.
    """

    def __init__(self, limits: Limits, roster: Roster) -> None:
        self._limits = limits
        self._roster = roster

    def expire(self, stage: Stage) -> None:
        """Kill and ask the members whose time has come."""
        for member in self._roster.alive():
            if member.wait.kill_at <= self._roster.now:
                given = (self._limits.elastic_timeout if member.wait.give_up_at <= self._roster.now
                         else self._limits.quiesce_timeout)
                reason = f"it did not {'answer' if stage is Stage.FINISHED else 'stop'} within {given:g} s"
                if member.phase is Phase.DISMISSED:
                    reason = "it did not exit when it was dismissed"
                elif member.wait.what != STOP or member.survives:  # else others are the reason
                    member.fault = reason
                self._roster.kill(member, reason)
            elif member.wait.ask_at <= self._roster.now:
                self._note(member, stage)
                self._roster.ask(member)

    def begin_to_ask(self, stage: Stage) -> None:
        """Set the clocks of members that were not told to stop: they run while others wait."""
        living = self._roster.living()
        phases = {member.phase for member in living}
        if stage is Stage.FINISHED:
            others_wait = Phase.IDLE in phases  # their world was lost; they have called elastic.run again
        else:
            others_wait = (stage in (Stage.MEETING, Stage.RUNNING, Stage.STOPPING)
                           and bool(phases & {Phase.FINISHED, Phase.IDLE}))
        for member in living:
            if not others_wait or member.phase not in (Phase.OUTSIDE, Phase.TRAINING):
                if member.wait.what == LIFE:
                    member.wait = NOTHING
            elif member.wait == NOTHING:
                member.wait = Wait(LIFE, ask_at=self._roster.now + self._limits.quiesce_timeout)

    def _note(self, member: Member, stage: Stage) -> None:
        """Tell the user, once, that others wait for a member."""
        waits = stage is Stage.ENDING or any(other.phase is Phase.IDLE for other in self._roster.living())
        if not waits or member.wait.is_noted or member.phase is Phase.FINISHED or not (
                member.survives or stage is Stage.FINISHED):
            return
        member.wait = dataclasses.replace(member.wait, is_noted=True)
        where, limit = "reached the boundary at which all ranks stop", "as long as it computes"
        if stage is Stage.ENDING:
            where, limit = "stopped", f"{self._limits.elastic_timeout:g} s"
        elif stage is Stage.FINISHED:
            where = "called elastic.run again"
        self._roster.note(f"{self._roster.who(member)} has not {where}; the others wait for it, at most "
                          f"{self._limits.quiesce_timeout:g} s if it does not answer, else {limit}")
