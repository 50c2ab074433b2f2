"""What has happened in an elastic job: failures, whether training goes on in spite of them, and lines for people."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hvdlite.membership.hosts import Slot
from hvdlite.membership.messages import WorldOrder

Progress = tuple[int, int]
"""How far training is: commits, and boundaries in the same world since the last one."""
_NONE: Final = (-1, 0)
_FROM_OUTSIDE: Final = frozenset(-each for each in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Exit codes of processes that others have ended: a user, a scheduler, the kernel where memory is short."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A member that has failed.

    Attributes:
        slot: where it ran.
        who: its rank and host, for people.
        code: its exit code, negative for a signal; None if it was lost with its host.
        exception: its type and message; "" if it is not known.
        fault: why it was killed, or how its host was lost; "" if it ended by itself.
        epoch: the world at that time.
        in_training: whether it can show that training makes no progress.
    """

    member: int
    slot: Slot
    who: str
    code: int | None
    exception: str
    fault: str
    epoch: int
    in_training: bool

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it: 128 + n for signal n; never 0."""
        return 1 if self.code is None else shell_code(self.code) or 1

    @property
    def why(self) -> str:
        """How it has ended, for people."""
        ending = "lost with its host" if self.code is None else exit_text(self.code)
        cause = self.exception or self.fault
        return f"{cause} ({ending})" if cause else ending

    @property
    def is_from_outside(self) -> bool:
        """Whether somebody else has ended it; hvdrun does so because of a fault."""
        return self.code in _FROM_OUTSIDE and not self.fault

    def __str__(self) -> str:
        return f"{self.who}: {self.why}"


class History:
    """The failures of members and the changes of worlds.

    It detects that members fail again and again at the same place. One slot alone is no sign of this, nor are signals from
    outside: slots that fail are used more and more rarely, and the others go on.

    Args:
        limit: so many worlds in a row that are lost by failures without progress are too many.

    Attributes:
        failures: all that there have been.
        failed_at_end: the first failure when training had finished; None if the job succeeds.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.failures: list[Failure] = []
        self.failed_at_end: Failure | None = None
        self._new: list[Failure] = []  # since `conclude`
        self._without_progress: list[Failure] = []  # in training, since it got further
        self._blamed: Failure | None = None
        self._progress = _NONE  # the greatest when a world was lost by a failure
        self._worlds = 0  # how many were lost by failures without progress; one slot, and signals from outside, count once
        self._were_ended = False  # some of these by signals from outside
        self._errors = 0  # worlds in a row that errors have ended, though all members live
        self._progress_at_error = _NONE  # the greatest then
        self._since: float | None = None  # when the first world began to end since one has met
        self._left: list[str] = []  # since then
        self._joined: list[str] = []
        self._refused: tuple[Sequence[str], Sequence[str], int, int] | None = None  # of the last call
        self._departures: list[str] = []  # of members that have not failed, in the whole job

    # --- failures ----------------------------------------------------------------------------------------------------------

    def add(self, failure: Failure) -> None:
        """Record a failure."""
        self.failures.append(failure)
        self._new.append(failure)

    def add_at_end(self, failure: Failure, *, is_rank_0: bool) -> str:
        """Record a failure after `elastic.run` has returned everywhere, and return the line about it.

        The job succeeds nevertheless if a rank other than 0 was killed or lost, and no other rank misses it: training has
        finished, and rank 0 keeps the result. An exception, and the loss of rank 0, are failures of the job.
        """
        self.add(failure)
        if (failure.code or -1) < 0 and not is_rank_0:
            return f"{failure}; training had finished"
        self.failed_at_end = self.failed_at_end or failure
        return str(failure)

    @property
    def blamed(self) -> Failure | None:
        """The failure to which the job's end is put down: the first one since training made progress."""
        return _first(self._new) or self._blamed

    def conclude(self, progress: Progress, error: str = "", *, are_enough: bool = True) -> str:
        """Judge the failures since the last call, when a world has ended.

        Args:
            progress: the greatest of any member that is left.
            error: why the world has ended, if all its members live and did not agree to stop.
            are_enough: the members that are left can go on without others.

        Returns:
            Why the job must end; "" if it can go on.
        """
        self._blamed = _first(self._new) or self._blamed
        new, self._new = [failure for failure in self._new if failure.in_training], []
        if error:
            self._errors = self._errors + 1 if progress <= self._progress_at_error else 1
            self._progress_at_error = progress
            if self._errors >= self._limit:
                return f"{self._errors} worlds in a row have ended with an error after commit {progress[0]}: {error}"
        if not new:
            return ""
        if progress > self._progress:
            self._progress, self._without_progress, self._worlds, self._were_ended = progress, [], 0, False
        self._without_progress += new
        is_one_slot = len({failure.slot for failure in self._without_progress}) == 1
        were_ended = are_enough and all(failure.is_from_outside for failure in new)
        if is_one_slot and are_enough:
            self._worlds = 1
        elif not (were_ended and self._were_ended):
            self._worlds += 1
        self._were_ended = self._were_ended or were_ended
        reason = self._judge()
        if reason:
            self._blamed = self._without_progress[0]
        return reason

    def begin_again(self, missing: Mapping[int, str]) -> None:
        """Forget how far training was: another one begins, and its commits may be counted from 0.

        Args:
            missing: the members of the world that do not take part in it, with their names.
        """
        failures = {failure.member: failure.why for failure in self.failures}
        for member, who in missing.items():
            self.left(who, failures.get(member, "it did not call elastic.run again"), failed=member in failures)
        self.failed_at_end = None
        self._progress = self._progress_at_error = _NONE
        self._without_progress, self._worlds, self._errors, self._were_ended = [], 0, 0, False

    def _judge(self) -> str:
        first: dict[str, Slot] = {}
        for failure in self._without_progress:
            if failure.exception and first.setdefault(failure.exception, failure.slot) != failure.slot:
                return f"two members have failed in the same way after commit {self._progress[0]}"
        if self._worlds >= self._limit:
            return (f"members have failed {self._worlds} times in a row after commit {self._progress[0]}, and training got "
                    "no further (--failures-without-progress)")
        return ""

    # --- changes -----------------------------------------------------------------------------------------------------------

    def began(self, now: float) -> None:
        """Note when a world began to end; of several, the first one counts until another world has met."""
        self._since = now if self._since is None else self._since

    def left(self, who: str, why: str, *, failed: bool = False) -> None:
        """Note that a member of the world has left.

        Args:
            failed: it has failed, and stands among the failures.
        """
        self._left.append(f"{who} ({why})")
        if not failed:
            self._departures.append(f"{who} left: {why}")

    def joined(self, who: Iterable[str]) -> None:
        """Note the members that a new world has more, with their ranks in it."""
        self._joined += who

    def refused(self, leaving: Sequence[str], room: int, discovered: int) -> tuple[str, bool]:
        """Note what the reset limit leaves out.

        Args:
            leaving: the members that would leave.
            room: the free slots that would be used.
            discovered: the same, with those that have failed.

        Returns:
            What is left out, in words, if it has changed, else ""; and whether that is because discovery has removed a host
            or found more room, since the limit was reached. The last change may have left out something itself.
        """
        slots = f"{room} free {'slot' if room == 1 else 'slots'}"
        what = [*(f"the removal of {who}" for who in leaving), *([slots] if room else [])]
        is_first, (told, left, most, found) = self._refused is None, self._refused or ([], [], 0, 0)
        self._refused = what, leaving, room, discovered
        is_change = not is_first and (not set(leaving) <= set(left) or (room > most and discovered > found))
        return f"left out: {', '.join(what)}" if what and what != told else "", is_change

    def reason(self, leaving: Mapping[str, str] | None = None) -> str:
        """Return what has changed, in a line.

        Args:
            leaving: members that leave with the next world, with the reasons.
        """
        left = [*self._left, *(f"{who} ({why})" for who, why in (leaving or {}).items())]
        both = (("left", left), ("joined", self._joined))
        return "; ".join(f"{what}: {', '.join(who)}" for what, who in both if who) or "no rank has left or joined"

    def met(self, order: WorldOrder, now: float) -> str:
        """Return the line about a world that has met, and begin anew."""
        seconds = 0.0 if self._since is None else now - self._since
        where = (f"after commit {order.commits}" if order.commits else "from the beginning") if order.restore else (
            "where training stopped")
        size = _ranks(len(order.members))
        line = f"world {order.epoch}, {size}, goes on {where}; {self.reason()}; it took {seconds:.2f} s"
        self._left, self._joined, self._since = [], [], None
        return line

    def summary(self, epoch: int, size: int) -> list[str]:
        """Return the lines for the end of a job."""
        return [f"{epoch} {'world' if epoch == 1 else 'worlds'}; the last one had {_ranks(size)}",
                *(f"failed: {failure} (world {failure.epoch})" for failure in self.failures), *self._departures]


def shell_code(code: int) -> int:
    """Return the exit code of a process as a shell reports it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def exit_text(code: int) -> str:
    """Return how a process has ended, for people."""
    if code >= 0:
        return f"exit code {code}"
    known = -code in {each.value for each in signal.Signals}
    return f"killed by signal {-code}" + (f" ({signal.Signals(-code).name})" if known else "")


def _first(failures: Sequence[Failure]) -> Failure | None:
    """Return the first failure, of those in training if there are any."""
    return next((failure for failure in failures if failure.in_training), failures[0] if failures else None)


def _ranks(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'}"
