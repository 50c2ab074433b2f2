"""One round of a gradient set: each member's gradient is reduced once."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence, Set
from typing import Any, Generic, Protocol

from hvdlite.core.errors import HvdliteError
from hvdlite.training.bucket_round import BucketViews
from hvdlite.training.framework import Parameter
from hvdlite.training.gradient_set import GradientSet
from hvdlite.training.members import Member
from hvdlite.training.order_errors import computed_again_without

_parameter_of = operator.attrgetter("parameter")


class Round(Generic[Parameter]):
    """Begins when the first member is given and is thrown away when its results are the parameters' gradients.

    It is open until this rank has given every member, then closed. Members are tagged with its id, so that a new round
    forgets the one before without visiting every member.

    Attributes:
        round_id: greater than that of every round before.
        is_closed: whether this rank has given every member.
        is_over: whether it cannot be waited for any more, because an exception has left it in the middle.
        is_of_failed_pass: whether the backward pass that began it did not come to its end, so that another pass ends it.
        has_again: whether a member was given with a gradient that was reduced in this generation already.
        incomplete: the error for a member that was given again, without the reduced gradients of some ranks.
        reduced: the parameters whose gradients were reduced.
        behind: ranks that took part from within their step, while others had not.
    """

    moves_gradients = True
    """Whether what is given leaves the parameter until the round is over."""

    def __init__(self, gradient_set: GradientSet[Parameter]) -> None:
        self.round_id = gradient_set.next_round()
        self.is_closed = self.is_over = self.is_of_failed_pass = self.has_again = False
        self.incomplete: HvdliteError | None = None
        self.reduced: list[Parameter] = []
        self.behind: set[int] = set()
        self._set = gradient_set
        self._late: dict[int, Member[Parameter]] = {}  # accumulated into again after they were given

    def give(self, member: Member[Parameter], present: bool) -> None:
        """Take a member in, with or without a gradient; from any thread."""
        raise NotImplementedError

    def give_small(self, keys: Set[int]) -> Set[int]:
        """Take in the small members of buckets, all of which have a gradient; return those that were taken.

        Args:
            keys: of members that could be given.
        """
        return frozenset()

    def close(self) -> None:
        """Every member is given."""
        self.is_closed = True

    def collect(self, errors: list[HvdliteError], deferrable: bool) -> None:
        """Wait for the results, and make them the parameters' gradients; append the errors of members.

        Raises:
            WaitDeferred: when that is allowed; may be called again then, and after an interrupt.
        """
        raise NotImplementedError

    def come_late(self, member: Member[Parameter]) -> None:
        """A gradient was accumulated into after it was given, or after this rank has told that there is none."""
        self._late[id(member.parameter)] = member

    def set_late_aside(self, errors: list[HvdliteError]) -> None:
        """Before results become gradients: keep what was accumulated since."""
        late = list(self._late.values())
        self._late.clear()
        for member in late:
            if self.moves_gradients or member.missing == self.round_id:
                self._set.gradients.set_aside(member)

    def withdraw(self) -> None:
        """While the round is left for later: keep further backward passes from writing to what it reduces."""
        if not (self._set.gradients.is_idempotent and self.moves_gradients):
            return  # further passes are errors, or what they add is reduced with the rest
        given = list(self._staged())
        if self.is_closed:  # a wait that was deferred may have come to some of them
            given += filter(self._set.gradients.is_reduced, self._set.members)
        for member in given:
            if member.missing != self.round_id and id(member.parameter) not in self._late:
                self._set.framework.take(member.parameter)  # the next one is accumulated into other memory then

    def notice_late(self) -> None:
        """After `withdraw`, in the middle of a backward pass: what it has computed so far comes too late."""
        if self._set.gradients.is_idempotent and self.moves_gradients:
            for member in self._set.members:
                if member.given == self.round_id and self._set.gradients.has_more(
                        member, was_missing=member.missing == self.round_id):
                    self.come_late(member)

    def _staged(self) -> Collection[Member[Parameter]]:
        """Return the members whose gradients are reduced in memory of their own."""
        return ()

    def _check_again(self, member: Member[Parameter], contributors: Collection[int] | None) -> None:
        """Without some ranks' reduced gradients, an average of reduced gradients is too small.

        Args:
            contributors: None: not all ranks, but it is not known which.
        """
        if member.again == self.round_id:
            ranks = self._set.runtime.members(self._set.process_set_id)
            others = () if contributors is None else set(ranks).difference(contributors)
            if others or contributors is None:
                self.incomplete = computed_again_without(member.name, others)

    def _mark_all(self, members: Sequence[Member[Parameter]], marks: Sequence[Any]) -> None:
        """The results are these members' gradients."""
        self._set.gradients.mark_all(members, marks)
        self.reduced += map(_parameter_of, members)


class Rounds(Protocol[Parameter]):
    """How the rounds of a reducer are made.

    Attributes:
        by_bucket: whether the last round that began goes by learned buckets.
        bucket_views: for the layout that was learned last; None when there is none, or when it does not describe the set.
    """

    by_bucket: bool
    bucket_views: BucketViews[Parameter] | None

    def begin(self, gradient_set: GradientSet[Parameter]) -> Round[Parameter]:
        """Begin a round of a set; the one before is over."""

    def forget(self) -> None:
        """The members, or the memory of their gradients, are others now."""
