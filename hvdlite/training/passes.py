"""A count of backward passes: each one makes a round."""

from __future__ import annotations


class PassCounter:
    """Counts the backward passes that no round has reduced yet.

    Every `per_round` passes make a round, whatever gradients they compute and wherever the rank waits: so ranks that make
    the same number of passes make the same number of rounds. A round that is not closed when the next pass begins takes in
    what it can of that pass; the pass still has a round that follows.

    Args:
        per_round: passes whose gradients are accumulated before each reduction.

    Attributes:
        is_suspended: whether gradients are accumulated locally, and passes do not count.
        pending: passes that ended and that no round was closed for.
    """

    __slots__ = ("is_suspended", "pending", "per_round")

    def __init__(self, per_round: int) -> None:
        self.per_round = per_round
        self.is_suspended = False
        self.pending = 0

    @property
    def are_due(self) -> bool:
        """Whether a round is due for the pending passes."""
        return self.pending >= self.per_round

    def end(self) -> None:
        """A backward pass is over."""
        self.pending += 1

    def reduce(self) -> None:
        """A round is closed."""
        self.pending = max(0, self.pending - self.per_round)

    def clear(self) -> None:
        """What was computed so far does not count."""
        self.pending = 0
