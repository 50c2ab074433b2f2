"""The failures of an elastic job: what they were, and whether training goes on in spite of them."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Failure:
    """A member that has failed.

    Attributes:
        who: its rank and host, for people.
        code: its exit code, negative for a signal; None if it was lost with its host.
        exception: its type and message; "" if it is not known.
        fault: why it was killed, or how its host was lost; "" if it ended by itself.
        epoch: the world at that time.
        in_training: whether it can show that training makes no progress.
    """

    member: int
    who: str
    code: int | None
    exception: str
    fault: str
    epoch: int
    in_training: bool

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it: 128 + n for signal n; never 0."""
        if self.code is None:
            return 1
        return 128 - self.code if self.code < 0 else self.code or 1

    @property
    def why(self) -> str:
        """How it has ended, for people."""
        if self.code is None:
            ending = "lost with its host"
        elif self.code >= 0:
            ending = f"exit code {self.code}"
        elif -self.code in {each.value for each in signal.Signals}:
            ending = f"killed by signal {-self.code} ({signal.Signals(-self.code).name})"
        else:
            ending = f"killed by signal {-self.code}"
        cause = self.exception or self.fault
        return f"{cause} ({ending})" if cause else ending

    def __str__(self) -> str:
        return f"{self.who}: {self.why}"


class FailureHistory:
    """Detects that members fail again and again at the same place.

    Args:
        limit: so many worlds in a row that are lost by failures without a new commit are too many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._commits = -1  # the greatest standing when a world was last lost by a failure
        self._new: list[Failure] = []  # since `conclude`
        self._without_progress: list[Failure] = []  # in training
        self._worlds = 0  # how many worlds these have ended
        self._errors = 0  # worlds in a row that errors have ended, though all members live
        self._commits_at_error = -1  # the greatest standing then
        self._blamed: Failure | None = None
        self.all: list[Failure] = []

    def add(self, failure: Failure) -> None:
        """Record a failure."""
        self.all.append(failure)
        self._new.append(failure)

    @property
    def blamed(self) -> Failure | None:
        """The failure to which the job's end is put down: the first one since training made progress."""
        return _first(self._new) or self._blamed

    def conclude(self, commits: int, error: str = "") -> str:
        """Judge the failures since the last call, when a world has ended.

        Args:
            commits: those of the greatest standing that is left.
            error: why the world has ended, if all its members live and did not agree to stop.

        Returns:
            Why the job must end; "" if it can go on.
        """
        self._blamed = _first(self._new) or self._blamed
        new, self._new = [failure for failure in self._new if failure.in_training], []
        if error:
            self._errors = self._errors + 1 if commits <= self._commits_at_error else 1
            self._commits_at_error = commits
            if self._errors >= self._limit:
                return f"{self._errors} worlds in a row have ended with an error after commit {commits}: {error}"
        if not new:
            return ""
        if commits > self._commits:
            self._commits, self._without_progress, self._worlds = commits, [], 0
        self._without_progress += new
        self._worlds += 1
        reason = self._judge()
        if reason:
            self._blamed = self._without_progress[0]
        return reason

    def begin_again(self) -> None:
        """Forget how far training was: another one begins, and its commits may be counted from 0."""
        self._commits = self._commits_at_error = -1
        self._without_progress, self._worlds, self._errors = [], 0, 0

    def _judge(self) -> str:
        first: dict[str, Failure] = {}
        for failure in self._without_progress:
            if failure.exception and first.setdefault(failure.exception, failure).member != failure.member:
                return f"two members have failed in the same way after commit {self._commits}"
        if self._worlds >= self._limit:
            return f"members have failed {self._worlds} times in a row after commit {self._commits}, without another commit"
        return ""


def _first(failures: Sequence[Failure]) -> Failure | None:
    """Return the first failure, of those in training if there are any."""
    return next((failure for failure in failures if failure.in_training), failures[0] if failures else None)
