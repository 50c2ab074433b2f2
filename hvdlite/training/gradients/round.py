"""One round of a gradient set, in which each member's gradient is reduced once; and what decides about rounds.

| round | event | then | what else |
|---|---|---|---|
| none | the first gradient; a pass ends with `wait_in="step"`; the step | open | what is trainable now comes in |
| open | a backward pass fails | open | the next pass belongs to it |
| open | a pass ends after which a round is due; the step; a gradient is read | closed | the rest is given, by its origin |
| closed | all buckets are done | none | results, what is trailing; further rounds while passes are due |
| closed | the wait is deferred, or left to the caller | closed | gradients are guarded; later waits are in the step |
| closed | an interrupt | closed | it is taken up again; in the middle of a communication hook: none |
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic

from hvdlite.core.errors import HvdliteError
from hvdlite.handoff.buckets import LearnedLayout
from hvdlite.training.gradients.bucket import Bucket, BucketOfWeights, BucketPlan, SmallMembers, planned
from hvdlite.training.gradients.errors import computed_again_without
from hvdlite.training.gradients.framework import Parameter
from hvdlite.training.gradients.gradient_set import GradientSet
from hvdlite.training.gradients.members import REDUCED, GradientState, Member, Members


class WaitIn(enum.Enum):
    """Where ranks wait for the reduced gradients."""

    BACKWARD = "backward"
    STEP = "step"


class Round(Generic[Parameter]):
    """What is known of one round: a new one resets all of it.

    Args:
        id: greater than that of every round before.
    """

    def __init__(self, id: int) -> None:
        self.id = id
        self.buckets: list[Bucket[Parameter]] = []  # by index, those in which members have places
        self.alone: list[Bucket[Parameter]] = []  # of one member each, and `weights`
        self.weights: BucketOfWeights[Parameter] | None = None  # what the ranks have counted
        self.is_closed = False  # this rank has given every member
        self.of_failed_pass = False  # the backward pass that began it did not come to its end: another pass ends it
        self.has_again = False  # a gradient was given of which a part is reduced already
        self.trailing: dict[Member[Parameter], GradientState] = {}  # accumulated into after given; their states before
        self.ranks_in_step: set[int] = set()  # ranks that took part from within their step, while others had not
        self.incomplete: HvdliteError | None = None  # for a member whose reduced part some ranks did not contribute

    def send_weights(self, gradient_set: GradientSet[Parameter]) -> None:
        """Every member is given: send what this rank has counted, if averages are weighted."""
        if gradient_set.weights.are_used:
            self.weights = BucketOfWeights(gradient_set)
            self.alone.append(self.weights)

    @property
    def factor(self) -> float | None:
        """When all buckets are done: by what results are multiplied; None where they are not to be used."""
        return 1.0 if self.weights is None else self.weights.factor

    def check_contributors(self, bucket: Bucket[Parameter], ranks: Collection[int]) -> None:
        """Without the reduced gradients of some of these ranks, an average of reduced gradients is too small."""
        for member, contributors in bucket.partial:
            if member.before is REDUCED:
                others = set() if contributors is None else set(ranks).difference(contributors)
                if others or contributors is None:
                    self.incomplete = computed_again_without(member.name, others)


MakeBucket = Callable[[GradientSet[Parameter], Members[Parameter], SmallMembers[Parameter]], Bucket[Parameter]]
"""Makes a bucket of all members for one round; they may be given together."""


class BucketPlans(Generic[Parameter]):
    """The buckets that are learned for a set; none until that is so.

    Args:
        make_bucket: for communication hooks: makes one of all members, and nothing is learned.

    Attributes:
        together: members that are given together, while they describe the set.
    """

    def __init__(self, make_bucket: MakeBucket[Parameter] | None) -> None:
        self.make_bucket = make_bucket
        self.together: Sequence[SmallMembers[Parameter]] = ()
        self.plans: list[BucketPlan[Parameter]] | None = None  # if they describe the set; kept while they are suspended
        self.is_used = False  # by the last round that began
        self._learned: LearnedLayout | None = None  # whose plans these are

    def forget(self) -> None:
        """It does not describe the set any more, or the runtime has ended."""
        self.plans = self._learned = None
        self.together = ()

    def buckets(self, gradient_set: GradientSet[Parameter], members: Members[Parameter],
                alone: list[Bucket[Parameter]]) -> list[Bucket[Parameter]]:
        """Return the buckets of a new round; none when its members go by themselves.

        Args:
            alone: gets the buckets of members that do so after all.
        """
        if self.make_bucket is not None:
            self.together = self.together or (SmallMembers([*members][::-1]),)
            return [self.make_bucket(gradient_set, members, self.together[0])]
        runtime = gradient_set.runtime
        learned = runtime.gradients.layout(gradient_set.label, gradient_set.round_id)
        if gradient_set.has_new_sparse or (learned is None and not runtime.gradients.is_suspended(gradient_set.label)):
            gradient_set.has_new_sparse = False
            self.forget()  # while it is suspended, gradients may lie in places that are used again
        if learned is not None and self._learned is not learned:
            self.plans, self._learned = planned(learned, gradient_set, members), learned
            self.together = self.plans or ()
        self.is_used = learned is not None and self.plans is not None
        if learned is None or self.plans is None:
            if learned is not None:
                self.forget()
                runtime.gradients.mark_stale(learned.layout)
            return []
        is_whole = sum(len(plan.members) for plan in self.plans) == len(members) and not gradient_set.weights.are_used
        last = len(self.plans) if is_whole else 0
        sent = itertools.count(1)
        return [Bucket(gradient_set, plan, sent, last, alone) for plan in self.plans]


class LaterCall:
    """A call of a step's closure after the first one, where reduced gradients can be reduced again.

    A rank that computes nothing in it is not aware whether others clear their gradients first. It leaves its own out, as
    if it had cleared them. That is wrong where another rank accumulates, so ranks compare what they did.
    """

    def __init__(self) -> None:
        self.incomplete: HvdliteError | None = None  # the first error of its rounds, until all ranks have compared
        self.is_decided = False  # by its first round
        self.accumulates = False  # onto gradients that were reduced before
        self.leaves_out = False  # gradients that were neither cleared nor accumulated onto

    def decide(self, members: Members[Any], *, accumulates: bool) -> None:
        """Before members that were not given yet are given to a round of this call."""
        if not self.is_decided:
            self.is_decided, self.accumulates = True, accumulates
            left = [] if accumulates or not members.is_idempotent else list(filter(members.is_reduced, members))
            self.leaves_out = any(not members.is_zeroed(member) for member in left)
            members.forget_reduced(left)


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

    __slots__ = ("_had_trailing", "_has_trailing", "is_suspended", "pending", "per_round")

    def __init__(self, per_round: int) -> None:
        self.per_round = per_round
        self.is_suspended = self._has_trailing = self._had_trailing = False
        self.pending = 0

    @property
    def are_due(self) -> bool:
        """Whether a round is due for the pending passes."""
        return self.pending >= self.per_round

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which gradients are accumulated locally."""
        before, self.is_suspended = self.is_suspended, True
        try:
            yield
        finally:
            self.is_suspended = before

    def note_trailing(self) -> None:
        """The pass that goes on has computed a gradient that cannot count in the round under way."""
        self._has_trailing = self._has_trailing or not self.is_suspended

    def end(self, *, joins_round: bool) -> None:
        """A backward pass is over.

        Args:
            joins_round: whether a pass that computed nothing trailing counts as a part of the open round.
        """
        if self._has_trailing or not joins_round or not self.are_due:
            self.pending += 1
        self._had_trailing = self._had_trailing or self._has_trailing
        self._has_trailing = False

    def reduce(self, *, of_failed_pass: bool) -> None:
        """A round is closed.

        Args:
            of_failed_pass: whether a pass that failed began it. When a pass has computed a gradient of it again since, what
                that pass has computed is still to be reduced.
        """
        if not (of_failed_pass and self._had_trailing):
            self.pending = max(0, self.pending - self.per_round)
        self._had_trailing = False

    def clear(self) -> None:
        """What was computed so far does not count."""
        self._has_trailing = self._had_trailing = False
        self.pending = 0
