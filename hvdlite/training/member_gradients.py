"""The gradients of the members: which are reduced already, and which count in the next round.

A reduced gradient is recognised by its *mark*: the tensor that the round left with the parameter, and how often it had been
written to by then. A mark belongs to a *generation*, which ends with the optimizer's step or with `zero_grad`. What is
accumulated between two rounds belongs to a *period*.

Reducing is *idempotent* when reducing a reduced gradient again leaves it as it is, as an average does. Then a member whose
gradient was reduced in this generation takes part in further rounds of it with that gradient, which may have been
accumulated onto: the average of (reduced + local) is reduced + the average of the local ones. So several backward passes
before a step are exact, also where only some ranks compute the gradient again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Generic

from hvdlite.training.framework import Framework, Parameter
from hvdlite.training.members import Member, set_on_all

_set_mark, _set_marked = set_on_all("mark"), set_on_all("marked")
_set_period = set_on_all("period")


class MemberGradients(Generic[Parameter]):
    """Knows the state of the members' gradients.

    Attributes:
        framework: gives access to gradients.
        has_marks: whether there are gradients that were reduced in this generation.
        period: the present one; it grows when what was accumulated has been reduced, or is cleared.
        is_idempotent: whether reducing a reduced gradient again leaves it as it is.
        takes_changed: whether reduced gradients count as present that were written to since their step.
    """

    def __init__(self, framework: Framework[Parameter]) -> None:
        self.framework = framework
        self._generation = 0  # grows when gradients are cleared or stepped with
        self.period = 1
        self.has_marks = self.is_idempotent = self.takes_changed = False
        self._aside: list[tuple[Member[Parameter], Any]] = []  # gradients that came too late for the round under way

    def touch(self, member: Member[Parameter]) -> None:
        """A backward pass has accumulated into the member's gradient."""
        if member.period != self.period:
            member.period, member.passes = self.period, 0

    def touch_all(self, members: Sequence[Member[Parameter]]) -> None:
        """Like `touch`, of members that are given to a round, so that their passes are not counted further."""
        _set_period(members, itertools.repeat(self.period))

    def mark_all(self, members: Sequence[Member[Parameter]], marks: Sequence[Any]) -> None:
        """The reduced gradients are the parameters'."""
        self.has_marks = True
        _set_mark(members, marks)
        _set_marked(members, itertools.repeat(self._generation))

    def forget_reduced(self, members: Iterable[Member[Parameter]]) -> None:
        """What was reduced of these members in this generation counts as reduced in an earlier one."""
        for member in members:
            member.marked = -1

    def leave_out(self, members: Iterable[Member[Parameter]]) -> bool:
        """Like `forget_reduced`; return whether that leaves out a reduced gradient that is neither cleared nor zeroed."""
        left = [member for member in members if self.is_again(member)]
        has_values = any(not self.framework.is_zeroed(member.parameter, member.mark) for member in left)
        self.forget_reduced(left)
        return has_values

    def end_period(self) -> None:
        """A round is over: what is accumulated from now on is new."""
        self.period += 1

    def end_generation(self) -> None:
        """The gradients were used or cleared."""
        self._generation += 1
        self.period += 1
        self.has_marks = False

    def renew(self, members: Iterable[Member[Parameter]]) -> None:
        """What has been written to the gradients so far does not make them new ones."""
        for member in members:
            if member.mark is not None:
                self.framework.renew(member.parameter, member.mark)

    def is_reduced(self, member: Member[Parameter]) -> bool:
        """Return whether the gradient is one that was reduced in this generation (and written to since, perhaps)."""
        return member.marked == self._generation and self.framework.is_marked(member.parameter, member.mark)

    def has_accumulated(self, member: Member[Parameter]) -> bool:
        """Return whether a backward pass of this period has accumulated into the gradient."""
        return member.period == self.period

    def is_current(self, member: Member[Parameter]) -> bool:
        """Return whether the gradient is the one that was reduced last, with nothing in it that counts as new.

        As in a step: clipping in the generation of the reduction is no change, and what was written since is one.
        """
        if member.period == self.period or not self.framework.is_marked(member.parameter, member.mark):
            return False
        return (member.marked == self._generation or not self.is_idempotent
                or not self.framework.is_changed(member.parameter, member.mark))

    def is_again(self, member: Member[Parameter]) -> bool:
        """Return whether a part of the gradient is what was reduced in this generation already."""
        return self.is_idempotent and self.is_reduced(member)

    def is_present(self, member: Member[Parameter]) -> bool:
        """Return whether a member that was not handed over takes part in a round with its gradient."""
        if not self.framework.has_gradient(member.parameter):
            return False
        if member.period == self.period or not self.framework.is_marked(member.parameter, member.mark):
            return True
        return self.is_idempotent and (member.marked == self._generation or (
            self.takes_changed and self.framework.is_changed(member.parameter, member.mark)))

    def replaced(self, members: Iterable[Member[Parameter]]) -> Member[Parameter] | None:
        """Return a member whose gradient was reduced in this generation, and is another tensor now."""
        generation, is_marked = self._generation, self.framework.is_marked  # this is done for every gradient of every step
        for member in members:
            if (member.marked == generation and not is_marked(member.parameter, member.mark)
                    and self.framework.has_gradient(member.parameter)):
                return member
        return None

    def have_unreduced(self, members: Iterable[Member[Parameter]]) -> bool:
        """Return whether a member without a reduction in this generation has a gradient that is new.

        It is new when it is not the one that was reduced last. Where that is exact also when that one has been written to.
        """
        return any(self.is_own(member) for member in members if member.marked != self._generation)

    def is_own(self, member: Member[Parameter]) -> bool:
        """Return whether the member has a gradient that the script has set, or has written to where that can be reduced."""
        if not self.framework.has_gradient(member.parameter):
            return False
        if member.mark is None or not self.is_idempotent:
            return not self.framework.is_marked(member.parameter, member.mark)
        return self.framework.is_changed(member.parameter, member.mark)

    def is_unseen(self, member: Member[Parameter]) -> bool:
        """Return whether the member has a gradient of which no backward pass and no round of this generation has told."""
        return member.marked != self._generation and member.period != self.period and self.is_own(member)

    def were_cleared(self, members: Iterable[Member[Parameter]], but: Member[Parameter] | None = None) -> bool:
        """Return whether there were reduced gradients in this generation, of which the script has left none.

        Args:
            but: into which a backward pass has just accumulated: its gradient is another tensor if it was cleared.
        """
        reduced = (member for member in members if member.marked == self._generation)
        first = next(reduced, None)
        return first is not None and not any(
            self.is_reduced(member) if member is but else self.framework.has_gradient(member.parameter)
            for member in itertools.chain([first], reduced))

    def were_zeroed(self, members: Iterable[Member[Parameter]]) -> bool:
        """Return whether there are reduced gradients in this generation, all of which the script has set to zero since."""
        found = False
        for member in members if self.has_marks else ():
            if member.marked == self._generation and self.framework.has_gradient(member.parameter):
                if not self.framework.is_zeroed(member.parameter, member.mark):
                    return False
                found = True
        return found

    def changed(self, members: Iterable[Member[Parameter]]) -> Member[Parameter] | None:
        """Return a member whose gradient was written to or replaced after its reduction in this generation."""
        return next((member for member in members if member.marked == self._generation
                     and self.framework.is_changed(member.parameter, member.mark)), None)

    def has_more(self, member: Member[Parameter], *, was_missing: bool) -> bool:
        """Return whether the gradient was accumulated into since it was taken away for a round, or was missing in it."""
        return self.is_own(member) if was_missing else self.framework.has_gradient(member.parameter)

    def set_aside(self, member: Member[Parameter]) -> None:
        """Keep a gradient that came too late for a round until that is over."""
        gradient = self.framework.take(member.parameter)
        if gradient is not None:
            self._aside.append((member, gradient))

    def drop_inexact(self) -> list[Member[Parameter]]:
        """Forget what was set aside and cannot be reduced in another round; return its members.

        Other ranks have had a gradient for them in the round that is over, where reducing it again is not exact.
        """
        if self.is_idempotent:
            return []
        dropped = [member for member, _ in self._aside if self.is_reduced(member)]
        self._aside = [(member, gradient) for member, gradient in self._aside if member not in dropped]
        return dropped

    def put_back(self) -> bool:
        """Add what was set aside to the reduced gradients; return whether there was anything."""
        if not self._aside:
            return False
        for member, gradient in self._aside:
            self.framework.accumulate(member.parameter, gradient)
            self.touch(member)
        self._aside.clear()
        return True
