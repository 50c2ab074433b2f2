"""The members that are reduced together in one round: gradients go into their places, the last one sends the bucket.

A bucket is FILLING until its last member is given, then SENT until its results are there, then DONE. What a gradient costs
here is a copy and a count: no lock, no message. The count is an `itertools.count`, whose `next` is one uninterrupted step,
so hooks may come from several autograd threads. Small gradients are copied together when their bucket is full: for them a
call costs more than a copy.

When a gradient does not fit its place any more, the bucket is BROKEN: each of its members goes by itself, as a bucket of
one, in the memory in which its gradient is, and the layout is learned again on all ranks.

Nothing here refers to the reducer or to the round, so that these are freed when they end.
"""

from __future__ import annotations

import enum
import itertools
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import Any, Generic

from hvdlite.core.array import SUPPORTED_DTYPES, Array, identity
from hvdlite.core.errors import HvdliteError
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.buckets import BucketHandle, LearnedLayout
from hvdlite.handoff.handle import Handle
from hvdlite.negotiation.messages import BucketReady
from hvdlite.training.gradients.errors import sparse
from hvdlite.training.gradients.framework import Alone, Framework, Gradient, Parameter, set_gradients
from hvdlite.training.gradients.gradient_set import GradientSet
from hvdlite.training.gradients.members import Member, set_held, set_ready


class BucketState(enum.Enum):
    """How far a bucket has come in its round."""

    FILLING = enum.auto()
    BROKEN = enum.auto()
    SENT = enum.auto()
    DONE = enum.auto()


FILLING, BROKEN, SENT, DONE = BucketState


class SmallMembers(Generic[Parameter]):
    """Members of a bucket that are given together, see `Bucket.fill_small`, in the order in which they are expected."""

    def __init__(self, small: Sequence[Member[Parameter]]) -> None:
        self.small = small
        self.small_keys = frozenset(id(member.parameter) for member in small)
        self._digest: bytes | None = None

    def digest(self, framework: Framework[Parameter]) -> bytes:
        """Return four bytes that are the same on all ranks whose members have the same names, dtypes and shapes."""
        if self._digest is None:
            text = "\n".join(f"{member.name} {framework.shape(member.parameter)}" for member in self.small)
            self._digest = zlib.crc32(text.encode()).to_bytes(4, "little")
        return self._digest


class BucketPlan(SmallMembers[Parameter]):
    """One bucket of a layout: its members and their places; lasts as long as the layout.

    Args:
        layout: ends on all ranks when the bucket breaks.
    """

    def __init__(self, layout: LearnedLayout, index: int, members: Sequence[Member[Parameter]],
                 framework: Framework[Parameter]) -> None:
        self.layout = layout
        self.learned = layout.buckets[index]
        self.is_only = len(layout.buckets) == 1
        self.members = members
        self.parameters = [member.parameter for member in members]
        self.places = framework.places(self.learned, self.parameters)
        super().__init__([members[place] for place in self.places.small])
        small = set(self.small)
        for place, member in enumerate(members):
            member.bucket, member.place, member.is_small = index, place, member in small


def planned(learned: LearnedLayout, gradient_set: GradientSet[Parameter],
            members: Iterable[Member[Parameter]]) -> list[BucketPlan[Parameter]] | None:
    """Return a layout's buckets; None when it does not describe these members, or how they are reduced (in this world)."""
    for member in members:
        member.is_sparse = member.is_sparse or member.name in learned.layout.unbucketed
        member.bucket = -1
    by_name = {member.name: member for member in members if not member.is_sparse}
    described = {each.name: each for bucket in learned.layout.buckets for each in bucket.members}
    factors = gradient_set.op, gradient_set.prescale, gradient_set.postscale
    if described.keys() != by_name.keys() or any(
            (bucket.response.op, bucket.response.prescale, bucket.response.postscale) != factors
            for bucket in learned.layout.buckets):
        return None
    for name, each in described.items():
        now = gradient_set.framework.shape(by_name[name].parameter)
        if (now.dtype, now.shape) != (each.dtype, each.shape) or each.strides not in ((), now.strides):
            return None
    return [BucketPlan(learned, index, [by_name[each.name] for each in bucket.definition.members], gradient_set.framework)
            for index, bucket in enumerate(learned.buckets)]


class Bucket(Generic[Parameter]):
    """A bucket of the layout in one round.

    Args:
        sent: counts the buckets of the round that are sent.
        last: which one of them ends the round; 0: none, because members go by themselves.
        alone: gets the buckets of its members when it breaks.
    """

    # After `finish`:
    reduced: Sequence[Member[Parameter]] = ()  # members to which some rank contributed
    gradients: Sequence[Gradient] = ()  # their gradients
    rest: Sequence[Member[Parameter]] = ()  # the other members: no rank contributed, or an error
    # Members that were given, of which ranks may be missing, and the ranks that contributed, if they are known.
    partial: Sequence[tuple[Member[Parameter], Collection[int] | None]] = ()
    errors: Sequence[HvdliteError] = ()
    ranks_in_step: Collection[int] = ()  # ranks that sent it from within their step, while others had not
    is_over = False  # an exception has left the wait in the middle, so that it cannot be taken up again
    holding: list[Member[Parameter]]  # members that hold what has left their parameters: here those that are unused

    def __init__(self, gradient_set: GradientSet[Parameter], plan: BucketPlan[Parameter], sent: Iterator[int], last: int,
                 alone: list[Bucket[Parameter]]) -> None:
        self.set = gradient_set
        self.plan = plan
        self.state = FILLING
        self._sent = sent
        self._last = last
        self._alone = alone
        self._size = len(plan.members)
        self._count = itertools.count(1)
        self._placed: list[int] = []  # places that hold gradients
        self._later: list[Member[Parameter]] = []  # small members whose gradients are not in their places yet
        self.holding = []
        self._has_own = False  # one of those was made by the script
        self._has_small = False  # a small member was given
        self._handle: BucketHandle | None = None

    def fill(self, member: Member[Parameter], is_own: bool) -> None:
        """Take the gradient that a member holds, which has left the parameter; from any thread.

        Args:
            is_own: whether the script has made it.
        """
        if self.state is BROKEN:
            self._send_alone(member, counts=True)
            return
        if member.is_small:
            self._later.append(member)
            self._has_small = True
            self._has_own = self._has_own or is_own
        else:
            gradients = [member.held]
            member.held = None  # so that nobody else in here uses it
            if not self.plan.places.fill((member.place,), gradients, is_own):
                member.held = gradients[0]
                self._break()
                self._send_alone(member, counts=True)
                return
            self._placed.append(member.place)
        if next(self._count) == self._size:
            self.send()

    def drop(self) -> None:
        """After `finish`: nobody is to use the results."""
        set_held(self.reduced, itertools.repeat(None))
        self.rest, self.reduced = [*self.rest, *self.reduced], ()

    def fill_small(self, keys: Set[int]) -> Set[int]:
        """Like `fill`, for all small members at once, from their parameters. Return these; none when that cannot be done.

        Args:
            keys: parameters, by identity, into which a backward pass has accumulated once.
        """
        plan = self.plan
        if not plan.small or self._has_small or self.state is BROKEN or not plan.small_keys <= keys:
            return frozenset()
        framework = self.set.framework
        parameters = plan.parameters if len(plan.small) == self._size else [member.parameter for member in plan.small]
        gradients = list(map(framework.get, parameters))
        set_gradients(framework, parameters, itertools.repeat(None))
        if not plan.places.fill(plan.places.small, gradients, False):
            set_gradients(framework, parameters, gradients)
            return frozenset()
        self._has_small = True
        set_ready(plan.small)
        self._placed += plan.places.small
        if next(itertools.islice(self._count, len(plan.small) - 1, None)) == self._size:
            self.send()
        return plan.small_keys

    def leave_out(self, member: Member[Parameter]) -> None:
        """This rank has no gradient of a member that counts; it holds what it has."""
        if self.state is BROKEN:
            self._send_alone(member, counts=False)
            return
        self._has_small = self._has_small or member.is_small
        if member.held is not None:
            held, member.held = [member.held], None  # so that nobody else in here uses it
            self.plan.places.vacate(member.place, held)
            member.held = held[0]
        self.holding.append(member)
        if next(self._count) == self._size:
            self.send()

    def send(self) -> None:
        """Every member is given."""
        if not (self._fill_later() and self._blank_unused()):
            self._break()
            return
        unused, ends_round = tuple(sorted(member.place for member in self.holding)), next(self._sent) == self._last
        self._handle = self.set.runtime.gradients.enqueue_bucket(
            self.plan.learned,
            BucketReady(bucket_id=self.plan.learned.definition.bucket_id, round_id=self.set.round_id, unused=unused,
                        ends_round=ends_round, step=self.set.step, in_step=self.set.in_step,
                        blocking=ends_round and self.plan.is_only and self.set.blocks),
            self.plan.places.filled())
        self.state = SENT

    def finish(self, deferrable: bool) -> None:
        """Wait for the results. Nothing is given to parameters before all buckets have theirs.

        Raises:
            WaitDeferred: when that is allowed; may be called again then, and after an interrupt.
        """
        if self.state is BROKEN or self.state is DONE:
            return
        if self._handle is None:  # an exception has kept it from being sent
            self.rest = self.plan.members
            return
        try:
            self._waited(self._handle, deferrable)
        except HvdliteError as error:
            self.errors, self.rest = [error], self.plan.members
        else:
            if self._handle.parts:
                self._take_parts(self._handle, deferrable)
            else:
                self._take_whole(self._handle)
        self.state = DONE

    def _waited(self, handle: Handle, deferrable: bool) -> Any:
        """Wait for a handle; return its result."""
        result = handle.wait(deferrable=deferrable)
        if handle.completion is not None:
            self.set.framework.follow(handle.completion)
        self.ranks_in_step = {*self.ranks_in_step, *handle.ranks_in_step}
        return result

    def _fill_later(self) -> bool:
        """Copy the small gradients that came one by one; return False when one does not fit."""
        if not self._later:
            return True
        places, small = self.plan.places, self.plan.small
        members = small if len(self._later) == len(small) else self._later
        gradients = [member.held for member in members]
        set_held(members, itertools.repeat(None))
        indices = places.small if members is small else [member.place for member in members]
        if not places.fill(indices, gradients, self._has_own):
            set_held(members, gradients)
            return False
        self._placed += indices
        self._later = []
        return True

    def _blank_unused(self) -> bool:
        """Fill the places of members without a gradient; return False when one has another shape or user."""
        response = self.plan.learned.definition.response
        for member in self.holding:
            value = identity(response.op, SUPPORTED_DTYPES[response.dtype])
            if not self.plan.places.blank(member.place, value, member.held):
                return False
        return True

    def _break(self) -> None:
        """Let all members that were given go by themselves."""
        self.state = BROKEN
        self.set.runtime.gradients.mark_stale(self.plan.layout.layout)
        placed, later, unused = [self.plan.members[place] for place in self._placed], self._later, self.holding
        set_held(placed, self.plan.places.take_back(self._placed))
        self._placed, self._later, self.holding = [], [], []
        for member in (*placed, *later):
            self._send_alone(member, counts=True)
        for member in unused:
            self._send_alone(member, counts=False)

    def _send_alone(self, member: Member[Parameter], *, counts: bool) -> None:
        self._alone.append(BucketOfOne(self.set, member, counts=counts))

    def _take_whole(self, handle: BucketHandle) -> None:
        members, unused = self.plan.members, handle.globally_unused
        if handle.partly_unused:
            left_out = set(self.holding)
            self.partial = [(members[place], None) for place in handle.partly_unused if members[place] not in left_out]
        places = None if not unused else [place for place in range(self._size) if place not in unused]
        self.gradients = self.plan.places.results(places)
        self.reduced = members if places is None else [members[place] for place in places]
        self.rest = [members[place] for place in sorted(unused)]

    def _take_parts(self, handle: BucketHandle, deferrable: bool) -> None:
        """Take the results of a bucket whose members were answered one by one."""
        errors, rest = list[HvdliteError](), list[Member[Parameter]]()
        partial: list[tuple[Member[Parameter], Collection[int] | None]] = []
        reduced: dict[int, Gradient | None] = {}  # by place; None: it lies there
        left_out = set(self.holding)
        for place, (member, part) in enumerate(zip(self.plan.members, handle.parts, strict=True)):
            try:
                result = self._waited(part, deferrable)
                if result.dtype.name != self.plan.learned.definition.members[place].dtype:
                    reduced[place] = gradient_of_rows(self.set, member, result)
                elif part.contributors:
                    if self.plan.learned.definition.members[place].strides:
                        self.plan.places.from_row_major(place, result)
                    reduced[place] = None
                if member not in left_out:
                    partial.append((member, part.contributors))
            except HvdliteError as error:
                errors.append(error)
            if place not in reduced:
                rest.append(member)
        dense = [place for place, rows in reduced.items() if rows is None]
        reduced.update(zip(dense, self.plan.places.results(dense), strict=True))
        self.reduced, self.gradients = [self.plan.members[place] for place in reduced], list(reduced.values())
        self.rest, self.partial, self.errors = rest, partial, errors


class BucketOfOne(Bucket[Parameter]):
    """A member by itself, which is sent at once.

    Args:
        counts: whether what it holds counts.
    """

    def __init__(self, gradient_set: GradientSet[Parameter], member: Member[Parameter], *, counts: bool) -> None:
        self.set = gradient_set
        self.holding = [member]
        self._counts = counts
        self._memory: Alone | None = None  # None: it is sent as rows of a sparse gradient
        self._one = self._enqueue(member)
        self.state = SENT

    def _enqueue(self, member: Member[Parameter]) -> Handle:
        framework, runtime, owner = self.set.framework, self.set.runtime, self.set
        rows = framework.rows(member.parameter, member.held) if self._counts else None
        if rows is not None:
            return runtime.gradients.enqueue_rows(member.name, rows, owner.moment, process_set=owner.process_set_id)
        self._memory = array, _ = framework.alone(member.parameter, member.held, self._counts)
        return runtime.gradients.enqueue_gradient(
            member.name, array if self._counts else None, array, owner.op, owner.moment,
            prescale=owner.prescale, postscale=owner.postscale, strides=framework.shape(member.parameter).strides,
            group_id=member.group_id, process_set=owner.process_set_id)

    def finish(self, deferrable: bool) -> None:
        if self.state is DONE:
            return
        [member], handle = self.holding, self._one
        try:
            result = self._waited(handle, deferrable)
            if self._counts:
                self.partial = [(member, handle.contributors)]
            if self._memory is None or result is not self._memory[0]:
                self.gradients = [gradient_of_rows(self.set, member, result)]
            elif handle.contributors:
                self.gradients = [self._memory[1]()]
        except HvdliteError as error:
            self.errors = [error]
        self.reduced, self.rest = ([member], ()) if self.gradients else ((), [member])
        self.state = DONE


class BucketOfWeights(Bucket[Parameter]):
    """What a rank has counted in a round (weights.py), which is sent at once.

    Attributes:
        factor: after `finish`: for the round's results; None when the ranks' weights do not fit together.
    """

    factor: float | None = None

    def __init__(self, owner: GradientSet[Parameter]) -> None:
        self.set, self.holding = owner, []
        self._rows = owner.runtime.gradients.enqueue_rows(
            f"{owner.label}.weights", owner.weights.take_rows(), owner.moment, process_set=owner.process_set_id)
        self.state = SENT

    def finish(self, deferrable: bool) -> None:
        if self.state is DONE:
            return
        try:
            self.factor = self.set.weights.factor(self._waited(self._rows, deferrable))
        except HvdliteError as error:
            self.errors = [error]
        self.state = DONE


def gradient_of_rows(gradient_set: GradientSet[Parameter], member: Member[Parameter], rows: Array) -> Gradient:
    """Return the gradient that consists of all ranks' rows.

    Raises:
        UnsupportedError: for another operation than Average and Sum.
    """
    if gradient_set.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise sparse(member.name, gradient_set.op)
    ranks = len(gradient_set.runtime.members(gradient_set.process_set_id))
    factor = gradient_set.prescale * gradient_set.postscale / (ranks if gradient_set.op is ReduceOp.AVERAGE else 1)
    gradient_set.has_new_sparse = gradient_set.has_new_sparse or not member.is_sparse
    member.is_sparse = True
    return gradient_set.framework.from_rows(member.parameter, rows, factor)
