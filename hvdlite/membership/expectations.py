"""What a member of an elastic job has to do, and how long others wait for it."""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal

from hvdlite.membership.events import Limits

Expected = Literal["", "stop", "boundary", "life", "exit"]
"""What a member has to do: to stop, to report its boundary, to show that it lives because others wait for it, to exit."""


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a member is expected to do, and until when (docs/protocol.md#boundaries).

    A member that was ordered to stop may compute for some time; one for which others wait at a boundary, at the end of
    `elastic.run` or in front of the next one may compute for as long as it likes. A stopped process would hold them up for
    ever: they are in no collective with it, so none of them misses it. So it is asked whether it lives; the thread of its
    link answers, whatever the script does, but not while a C call holds the GIL. So the launcher looks at the same time
    whether its process is stopped; only then it is killed early.

    Attributes:
        what: what it has to do; "" if others do not wait for it.
        kill_at: when it is killed, if it has not done so; for most, the heartbeat time after they were asked.
        ask_at: when it is asked whether it lives.
        give_up_at: when it is killed though it lives.
        why: why it is killed then, if others have blamed it.
        stopped_until: when it is killed because its process is stopped, if it has not answered.
        is_noted: whether the user has been informed that others wait for it.
    """

    what: Expected = ""
    kill_at: float = math.inf
    ask_at: float = math.inf
    give_up_at: float = math.inf
    is_noted: bool = False
    why: str = ""
    stopped_until: float = math.inf

    def prolonged(self, now: float, limits: Limits, *, computes: bool, survives: bool) -> Expectation:
        """Return how long a member that has reported that it lives is waited for.

        Args:
            computes: the script does, and the background thread has ended; else this thread is slow to end, or hangs.
            survives: it can go on with the others in another world.
        """
        timeout, wait = limits.quiesce_timeout, dataclasses.replace(self, stopped_until=math.inf)
        if self.what == "life":
            return dataclasses.replace(wait, kill_at=math.inf, ask_at=now + 2 * timeout)
        if self.what != "stop" or not survives:
            return wait
        if computes:
            return dataclasses.replace(wait, kill_at=self.give_up_at, ask_at=now + timeout / 2)
        return dataclasses.replace(wait, ask_at=now + timeout / 8)


NOTHING: Final = Expectation()
