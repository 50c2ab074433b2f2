"""A count of backward passes: each one makes a round."""

from __future__ import annotations


class PassCounter:
    """Counts the backward passes that no round has reduced yet.

    Every `per_round` passes make a round, so ranks that make the same passes make the same number of rounds. A pass that
    comes while a round is under way has a round that follows; it can join an open one if it computes no gradient again.

    Args:
        per_round: passes whose gradients are accumulated before each reduction.

    Attributes:
        is_suspended: whether gradients are accumulated locally, and passes do not count.
        pending: passes that ended and that no round was closed for.
    """

    __slots__ = ("_is_late", "_were_late", "is_suspended", "pending", "per_round")

    def __init__(self, per_round: int) -> None:
        self.per_round = per_round
        self.is_suspended = self._is_late = self._were_late = False
        self.pending = 0

    @property
    def are_due(self) -> bool:
        """Whether a round is due for the pending passes."""
        return self.pending >= self.per_round

    def note_late(self) -> None:
        """The pass that goes on has computed a gradient that cannot count in the round under way."""
        self._is_late = self._is_late or not self.is_suspended

    def end(self, *, joins_round: bool) -> None:
        """A backward pass is over.

        Args:
            joins_round: whether a pass that was not late counts as a part of the open round.
        """
        if self._is_late or not joins_round or not self.are_due:
            self.pending += 1
        self._were_late = self._were_late or self._is_late
        self._is_late = False

    def reduce(self, *, of_failed_pass: bool) -> None:
        """A round is closed.

        Args:
            of_failed_pass: whether a pass that failed began it. When a pass has computed a gradient of it again since, what
                that pass has computed is still to be reduced.
        """
        if not (of_failed_pass and self._were_late):
            self.pending = max(0, self.pending - self.per_round)
        self._were_late = False

    def clear(self) -> None:
        """What was computed so far does not count."""
        self._is_late = self._were_late = False
        self.pending = 0
