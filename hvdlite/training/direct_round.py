"""Rounds that the runtime reduces: member by member until the set's layout is learned, then by learned buckets."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Set

from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import Handle
from hvdlite.training.bucket_round import BucketRound, BucketViews
from hvdlite.training.framework import Parameter, StagedGradient
from hvdlite.training.gradient_set import GradientSet
from hvdlite.training.members import Member, set_on_all
from hvdlite.training.order_errors import overwritten, sparse
from hvdlite.training.round import Round, Rounds

_set_given = set_on_all("given")


class DirectRounds(Rounds[Parameter]):
    """Begins rounds by the layout that was learned last.

    Attributes:
        bucket_views: for that layout; None when there is none, or when it does not describe the set.
        members: of that layout, by bucket.
        small: those of them that `bucket_views` have as small.
    """

    def __init__(self) -> None:
        self.by_bucket = False
        self.bucket_views: BucketViews[Parameter] | None = None
        self.members: list[list[Member[Parameter]]] = []
        self.small: list[list[Member[Parameter]]] = []

    def begin(self, gradient_set: GradientSet[Parameter]) -> Round[Parameter]:
        begun = DirectRound(gradient_set, self)
        begun.buckets = self._buckets(gradient_set, begun.round_id)
        self.by_bucket = begun.buckets is not None
        return begun

    def forget(self) -> None:
        self.bucket_views = None

    def _buckets(self, gradient_set: GradientSet[Parameter], round_id: int) -> BucketRound[Parameter] | None:
        """Return the buckets of a new round; None when its members go by themselves."""
        runtime, framework = gradient_set.runtime, gradient_set.framework
        learned = runtime.layout(gradient_set.label, round_id)
        if learned is None:
            if not runtime.is_suspended(gradient_set.label):  # else gradients may lie in bucket views that are used again
                self.bucket_views = None
            return None
        if self.bucket_views is None or self.bucket_views.learned is not learned:
            for member in gradient_set.members:
                member.sparse = member.sparse or member.name in learned.layout.unbucketed
            self.bucket_views = None if not gradient_set.has_factors_of(learned.layout) else BucketViews.of(
                learned, framework, {member.name: member.parameter for member in gradient_set.members if not member.sparse})
            if self.bucket_views is not None:
                by_key = gradient_set.members.by_key
                self.members, self.small = ([[by_key[id(parameter)] for parameter, _ in pairs] for pairs in buckets]
                                            for buckets in (self.bucket_views.members, self.bucket_views.small))
        if self.bucket_views is None:
            runtime.mark_stale(learned.layout)
            return None
        closes = not any(member.sparse for member in gradient_set.members)
        return BucketRound(runtime, framework, self.bucket_views, round_id, gradient_set.step, closes=closes)


class DirectRound(Round[Parameter]):
    """One of them.

    Attributes:
        buckets: None when all members go by themselves.
    """

    def __init__(self, gradient_set: GradientSet[Parameter], rounds: DirectRounds[Parameter]) -> None:
        super().__init__(gradient_set)
        self.buckets: BucketRound[Parameter] | None = None
        self._rounds = rounds
        # Reduced by themselves; None: as rows of a sparse gradient.
        self._alone: list[tuple[Member[Parameter], Handle, StagedGradient[Parameter] | None]] = []

    def give(self, member: Member[Parameter], present: bool) -> None:
        owner, gradients, buckets = self._set, self._set.gradients, self.buckets
        if present and gradients.has_marks and gradients.is_again(member):
            member.again = self.round_id
            self.has_again = True
        if buckets is None or member.sparse:
            self._enqueue(member, present)
        elif present:
            for parameter, has_gradient in buckets.give(member.parameter, True, owner.in_step):
                self._enqueue(owner.members.by_key[id(parameter)], has_gradient)
        else:
            self._give_missing(member, buckets)
        member.given = self.round_id
        if not present:
            member.missing = self.round_id

    def give_small(self, keys: Set[int]) -> Set[int]:
        taken: set[int] = set()
        if self.buckets is None:
            return taken
        for index, alone in self.buckets.give_small(keys, self._set.in_step):
            small = self._rounds.small[index]
            self._set.gradients.touch_all(small)
            _set_given(small, itertools.repeat(self.round_id))
            taken |= self.buckets.bucket_views.small_keys[index]
            for parameter, has_gradient in alone:
                self._enqueue(self._set.members.by_key[id(parameter)], has_gradient)
        return taken

    def close(self) -> None:
        if self._alone or self.buckets is None:
            self._set.runtime.close_round(self._set.label, self.round_id, self._set.process_set_id)
        super().close()

    def collect(self, errors: list[HvdliteError], deferrable: bool) -> None:
        framework, by_key = self._set.framework, self._set.members.by_key
        self.reduced = []
        if self.buckets is not None:
            for index, reduced, marks in self.buckets.wait(errors, deferrable):
                members = self._rounds.members[index]
                self._mark_all(members if len(reduced) == len(members)
                               else [by_key[id(parameter)] for parameter, _ in reduced], marks)
            for parameter, contributors in self.buckets.contributors:
                self._check_again(by_key[id(parameter)], contributors)
            for parameter in self.buckets.partly_unused:
                self._check_again(by_key[id(parameter)], None)
            for parameter, rows in self.buckets.gathered:
                self._take_rows(by_key[id(parameter)], rows, errors)
            self.behind.update(self.buckets.behind)
        for member, handle, staged in self._alone:
            try:
                result = handle.wait(deferrable=deferrable)
            except HvdliteError as error:
                errors.append(error)
                continue
            if handle.completion is not None:
                framework.follow(handle.completion)
            self.behind.update(handle.behind)
            self._check_again(member, handle.contributors)
            if staged is None or result is not staged.array:
                self._take_rows(member, result, errors)
            elif handle.contributors:
                self._mark_all([member], [framework.unstage(staged)])

    def set_late_aside(self, errors: list[HvdliteError]) -> None:
        for member, _, staged in self._alone if self._late else ():
            if id(member.parameter) in self._late and staged is not None and self._set.framework.is_staged(staged):
                del self._late[id(member.parameter)]
                errors.append(overwritten(member.name, self._set.rank))
        super().set_late_aside(errors)

    def _staged(self) -> Collection[Member[Parameter]]:
        return [member for member, _, _ in self._alone]

    def _give_missing(self, member: Member[Parameter], buckets: BucketRound[Parameter]) -> None:
        is_own = self._set.gradients.is_own(member)
        for parameter, has_gradient in buckets.give(member.parameter, False, self._set.in_step):
            self._enqueue(self._set.members.by_key[id(parameter)], has_gradient)
        while buckets.detached:
            _, mark = buckets.detached.pop()  # of this member
            member.mark = None if is_own else mark

    def _enqueue(self, member: Member[Parameter], present: bool) -> None:
        """Let a member go by itself."""
        owner, runtime, framework = self._set, self._set.runtime, self._set.framework
        moment = owner.moment()
        if present and framework.is_sparse(member.parameter):
            rows = framework.rows(member.parameter)
            handle = runtime.enqueue_rows(member.name, rows, moment, process_set=owner.process_set_id)
            self._alone.append((member, handle, None))
            return
        staged = framework.stage(member.parameter) if present else framework.stage_empty(member.parameter)
        handle = runtime.enqueue_gradient(
            member.name, staged.array if present else None, staged.array, owner.op, moment,
            prescale=owner.prescale, postscale=owner.postscale, strides=framework.shape(member.parameter).strides,
            group_id=member.group_id, process_set=owner.process_set_id)
        self._alone.append((member, handle, staged))

    def _take_rows(self, member: Member[Parameter], rows: Array, errors: list[HvdliteError]) -> None:
        owner = self._set
        if owner.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            errors.append(sparse(member.name, owner.op))
            return
        divisor = owner.size if owner.op is ReduceOp.AVERAGE else 1
        mark = owner.framework.give_rows(member.parameter, rows, owner.prescale * owner.postscale / divisor)
        self._mark_all([member], [mark])
        if not member.sparse:
            member.sparse = True
            self._rounds.forget()
