"""The policy behind every `DistributedOptimizer`: when gradients are reduced.

A *gradient set* is the parameters of one wrapped optimizer. A *round* reduces each of them once. It is open from the first
gradient that is handed over until this rank has given every member, then closed until the results are final.

Its states are in files of their own; see docs/decisions/0033.

Rules (docs/protocol.md#rounds, #final-gradients, #same-step, #reduced-again)
- A gradient is handed over by its hook, as soon as it has been accumulated `passes` times: communication overlaps the
  rest of the backward pass.
- With `WaitIn.BACKWARD` the outermost backward pass closes the round (a member that was not handed over is *missing*) and
  waits for the results. With `WaitIn.STEP` the optimizer's step does both, or whatever reads a gradient first.
- The wait in a backward pass can be *deferred*: the coordinator does so when ranks wait for each other in a circle. The
  round is then waited for where a gradient is read. The framework makes sure that nobody reads one earlier.
- Every rank takes part in every round. A rank that steps without a backward pass takes part with everything missing. All
  ranks make the same number of rounds between two steps; the coordinator refuses a round in which they differ.
- A rank that takes part from within its step cannot have processed the gradients (clipping) as the others did. When
  another rank did change them in between, its step raises.
- A parameter to which nobody contributed keeps what it has (None): momentum and weight decay do not move it.
- Accumulating onto a reduced gradient is reduced in another round where that is exact (`is_idempotent`: for averages). For
  other operations the reduced part would count twice, so that is an error, unless the gradient was cleared.
- Every backward pass has a round (`PassCounter`); with `WaitIn.STEP`, a pass that computes no gradient again joins the round
  that is open. A gradient that is computed again while the round that has it is under way is set aside and added to the
  reduced one; it is reduced in the round of its own pass.
- Gradients that the script has all cleared itself, before the first one of a backward pass, begin anew as with `zero_grad`.
  Where it has set all of them to zero, a round is due before the step.
- In a later call of a step's closure, reduced gradients count on ranks that accumulate onto one. Elsewhere they count as
  cleared. When some rank accumulates and another one has cleared nothing, all ranks raise.
- A gradient that was not computed by a watched backward pass counts when it is not the one that was reduced last. In the
  step (and in `synchronize()`), one that was written to since the step before counts too.
- A parameter that does not require a gradient is no member. It becomes one in the first round that finds it trainable.
- Until its set is learned, a gradient goes by itself, in memory that the framework stages. Afterwards it goes into its slice
  of a bucket (`training/bucket_round.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Generic

from hvdlite.core.array import Array
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.bucket_round import BucketViews
from hvdlite.training.direct_round import DirectRounds
from hvdlite.training.framework import Framework, Parameter
from hvdlite.training.gradient_set import GradientSet
from hvdlite.training.later_call import LaterCall
from hvdlite.training.members import Member
from hvdlite.training.order_errors import changed_alone, computed_twice, reduction_told, replaced
from hvdlite.training.replicas import check_replicas
from hvdlite.training.round import Rounds
from hvdlite.training.round_sequence import JOB_CONTINUES, RoundSequence
from hvdlite.training.waiting import WaitIn


class GradientReducer(Generic[Parameter]):
    """Reduces the gradients of one wrapped optimizer.

    Args:
        framework: gives access to gradients.
        label: makes names unique among the wrapped optimizers of this process; equal on all ranks.
        op: AVERAGE or SUM (or MIN, MAX).
        prescale: factor before the reduction.
        postscale: factor after it.
        passes: backward passes whose gradients are accumulated before each reduction.
        process_set: id of the ranks that take part; other ranks train alone.
        wait_in: where the results are waited for.
        rounds: makes the rounds. Default: rounds that the runtime reduces.

    Attributes:
        is_shared: whether other ranks take part; otherwise this rank trains alone.
        label: see above.
        sequence: the rounds, and what is waited for.
        gradients: which gradients of the members are reduced.
        looks_for_own: whether gradients are reduced with which a script has replaced reduced ones. Where reducing them again
            is not exact, that raises.
    """

    def __init__(self, runtime: Runtime, framework: Framework[Parameter], label: str, *, op: ReduceOp, prescale: float,
                 postscale: float, passes: int, process_set: int = GLOBAL_PROCESS_SET_ID,
                 wait_in: WaitIn = WaitIn.BACKWARD, rounds: Rounds[Parameter] | None = None) -> None:
        ranks = runtime.members(process_set)
        self.is_shared = len(ranks) > 1 and runtime.world.rank in ranks
        self.label = label
        self._set = GradientSet(runtime, framework, label, op=op, prescale=prescale, postscale=postscale,
                                process_set_id=process_set)
        self._members, self.gradients = self._set.members, self._set.gradients
        self._by_key = self._members.by_key
        self.sequence = RoundSequence(self._set, DirectRounds() if rounds is None else rounds, passes, wait_in)
        self._passes = self.sequence.passes
        self.looks_for_own = False
        if self.is_shared:
            weakref.finalize(self, runtime.retire, label, process_set).atexit = False

    @property
    def framework(self) -> Framework[Parameter]:
        """Gives access to gradients."""
        return self._set.framework

    @property
    def round_id(self) -> int:
        """The id of the last round that began."""
        return self._set.round_id

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and its results are not final yet."""
        return self.sequence.current is not None

    @property
    def has_reduced(self) -> bool:
        """Whether a round has ended since the last step."""
        return self.sequence.closed > 0 and not self.is_under_way

    @property
    def parameters(self) -> Iterator[Parameter]:
        """The parameters of all members, and of those that become members after the round."""
        return filter(self._set.framework.is_trainable, self._members.parameters())

    @property
    def bucket_views(self) -> BucketViews[Parameter] | None:
        """The places of gradients in learned buckets; None when there are none."""
        return self.sequence.rounds.bucket_views

    def change_framework(self, framework: Framework[Parameter]) -> None:
        """Between rounds: access gradients in another way, because they are in another memory now."""
        self._set.framework = self.gradients.framework = framework
        self.sequence.rounds.forget()

    def add(self, parameter: Parameter, name: str, group_id: int = 0) -> None:
        """Take a parameter into the set, from the next round on in which it is trainable; the same ones on all ranks.

        Args:
            group_id: parameters with the same one, from 1, are reduced together.
        """
        self._members.add(parameter, name, group_id)
        self.sequence.admit()

    def hand_over(self, parameter: Parameter) -> None:
        """A backward pass has accumulated this parameter's gradient.

        Raises:
            GradientOrderError: when it was computed more often than `passes` times before the step.
        """
        member = self._by_key.get(id(parameter)) or self._newcomer(parameter)
        if member is None:
            self._passes.note_late()  # its gradient counts in the next round
            return
        sequence, gradients, passes = self.sequence, self.gradients, self._passes
        current = sequence.current
        if current is None:
            if gradients.has_marks and gradients.were_cleared(self._members, but=member):
                sequence.begin_generation()
        elif member.given == current.round_id:
            if member.missing != current.round_id and not gradients.is_idempotent:
                raise computed_twice(member.name, self._set.rank, passes.per_round, reduction_told(self._set.op))
            current.come_late(member)
            passes.note_late()
            return
        if not gradients.is_idempotent and gradients.is_reduced(member):
            raise computed_twice(member.name, self._set.rank, passes.per_round, reduction_told(self._set.op))
        sequence.is_touched = True
        if member.period != gradients.period:
            gradients.touch(member)
        if passes.is_suspended:
            return
        member.passes += 1
        if member.passes >= passes.per_round:
            (current or sequence.begin()).give(member, self._set.framework.has_gradient(parameter))

    def hand_over_small(self, keys: Set[int]) -> Set[int]:
        """Like `hand_over`, for all small gradients of a bucket at once; return the parameters that are handed over.

        Args:
            keys: parameters, by identity, whose gradients a backward pass has accumulated once.
        """
        sequence, passes = self.sequence, self._passes
        if passes.is_suspended or passes.per_round > 1 or self.gradients.has_marks:
            return frozenset()
        taken = sequence.begin().give_small(keys)
        sequence.is_touched = sequence.is_touched or bool(taken)
        return taken

    def end_backward(self) -> bool:
        """The outermost backward pass is over; return whether its caller is to `wait_and_make_due` now.

        Waiting is apart, because one backward pass can serve several sets: all of them must be closed before anybody waits,
        or two ranks could wait for each other's other set. While the round is under way afterwards, gradients are not final.
        """
        if self._passes.is_suspended:
            return False
        self._passes.end(joins_round=not self.sequence.waiting.closes_in_backward)
        if not self._passes.are_due:
            return False
        if not self.sequence.waiting.closes_in_backward:
            self.sequence.begin()  # where nothing has been handed over, gradients are not final either
            return False
        self.sequence.close()
        return self.sequence.waiting.waits_in_backward

    def fail_backward(self) -> None:
        """A backward pass has failed: the round that it began, if it did, is also that of the pass that follows."""
        current = self.sequence.current
        if current is not None and not current.is_closed and not self._passes.are_due:
            current.is_of_failed_pass = True

    def finish_if_due(self, *, in_step: bool = False) -> None:
        """End a round that is under way, and take part in one if there was none since the last step.

        Args:
            in_step: whether the step that uses the gradients follows without the script being able to change them.

        Raises:
            GradientOrderError: when this rank changed gradients in between, and other ranks could not.
            HorovodInternalError: Like `finish`.
        """
        self.sequence.admit()
        if not self._members:
            return
        with self.sequence.lock:  # another thread that reads a gradient meanwhile finds the round over
            self._set.in_step = in_step
            try:
                self._finish_if_due()
            finally:
                self._set.in_step = self.gradients.takes_changed = False

    def expect_round(self) -> None:
        """A round is due before gradients are used, whatever this rank computes."""
        if not self.is_under_way:
            self.sequence.closed = 0

    def begin_later_call(self) -> None:
        """A step's closure is called again, and computes gradients anew or accumulates them."""
        self.expect_round()
        if self.gradients.is_idempotent:
            self.sequence.later_call = LaterCall()

    def end_later_call(self) -> None:
        """After `finish_if_due`: the closure's gradients are final; all ranks call this.

        Raises:
            GradientOrderError: on all ranks, when some accumulated onto gradients that others left out.
        """
        call, self.sequence.later_call = self.sequence.later_call, None
        if call is not None:
            call.check(self._set)

    def abandon_later_call(self) -> None:
        """An exception has ended the call: rounds that follow are no part of it, and raise their own errors."""
        self.sequence.later_call = None

    def unseen(self) -> list[Parameter]:
        """Return the parameters whose gradients the script has set, and that are reduced with the next round."""
        if self._passes.is_suspended:
            return []
        return [member.parameter for member in self._members if self.gradients.is_unseen(member)]

    def member(self, parameter: Parameter) -> Member[Parameter] | None:
        """Return the member that a parameter is; None when it is none, or not yet."""
        return self._by_key.get(id(parameter))

    def is_reduced(self, parameter: Parameter) -> bool:
        """Return whether the parameter's gradient is one that was reduced in this step (and changed since, perhaps)."""
        member = self._by_key.get(id(parameter))
        return member is not None and self.gradients.is_reduced(member)

    def used_elsewhere(self, parameters: Iterable[Parameter]) -> None:
        """Another reducer's step has used these gradients, or they were cleared there: later ones are reduced anew."""
        members = [member for parameter in parameters if (member := self.member(parameter)) is not None]
        self.gradients.forget_reduced(members)
        if members:
            self.expect_round()

    def take_over(self, parameter: Parameter, other: GradientReducer[Parameter]) -> bool:
        """Return whether a gradient that another reducer has not reduced is to be reduced here."""
        own, theirs = self.member(parameter), other.member(parameter)
        if theirs is not None and other.gradients.is_current(theirs):
            return False
        if own is not None and theirs is not None and other.gradients.has_accumulated(theirs):
            self.gradients.touch(own)
            self.sequence.is_touched = True
        return True

    def stepped(self) -> None:
        """The optimizer has used the gradients; accumulating onto them is the user's business again."""
        self._set.step += 1
        self._set.runtime.progress.round()
        self.cleared()

    def cleared(self) -> None:
        """The gradients were cleared: what was computed so far does not count, so a round is due before the next step."""
        self.sequence.finish_current()
        self.sequence.behind.clear()
        self.sequence.begin_generation()
        self.sequence.is_touched = False

    def zeroed(self) -> None:
        """After `cleared`: the gradients were set to zero, in place, which does not make them the script's own."""
        self.gradients.renew(self._members)

    def check_replicas(self, named: Sequence[tuple[str, Array]]) -> None:
        """Compare the parameters of all ranks that take part; see `training.replicas`."""
        check_replicas(self._set.runtime, named, f"{self.label}.check", self._set.process_set_id)

    def set_passes(self, passes: int) -> None:
        """Change the number of accumulated backward passes, from the next round on."""
        self._passes.per_round = passes
        self.cleared()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Accumulate locally; the first backward pass after it reduces everything."""
        before, self._passes.is_suspended = self._passes.is_suspended, True
        try:
            yield
        finally:
            self._passes.is_suspended = before

    def _newcomer(self, parameter: Parameter) -> Member[Parameter] | None:
        """Return the member for a parameter that has its first gradient; None when it has to wait for the round's end."""
        self.sequence.admit()
        return self._by_key.get(id(parameter))

    def _finish_if_due(self) -> None:
        sequence = self.sequence
        if sequence.closed == 0 or self.is_under_way or self._were_cleared_or_zeroed():
            try:
                sequence.finish()
            except JOB_CONTINUES:
                if not self.is_under_way:
                    with suppress(*JOB_CONTINUES):
                        self._finish_rest()
                raise
        if self._set.in_step and sequence.behind:
            self._check_unchanged()
        self._finish_rest()
        if not self._passes.is_suspended and (self._set.in_step or self.looks_for_own) and self._has_unreduced():
            self.gradients.takes_changed = True
            sequence.finish()

    def _finish_rest(self) -> None:
        """Reduce what was computed since the last round, which is less than a round's passes."""
        if not self._passes.is_suspended and (self.sequence.is_touched or self._passes.pending):
            self.sequence.finish()

    def _were_cleared_or_zeroed(self) -> bool:
        """Return whether the script has cleared the gradients of a step that it skipped, and computed none since."""
        if self.gradients.were_cleared(self._members):
            return True
        return not self.sequence.is_touched and not self.sequence.behind and self.gradients.were_zeroed(self._members)

    def _has_unreduced(self) -> bool:
        """Return whether a gradient is about to be used that no backward pass handed over."""
        if self.gradients.have_unreduced(self._members):
            return True
        other = self.gradients.replaced(self._members) if self.looks_for_own else None
        if other is not None and not self.gradients.is_idempotent:
            raise replaced(other.name, self._set.rank, reduction_told(self._set.op))
        return other is not None

    def _check_unchanged(self) -> None:
        changed = self.gradients.changed(self._members)
        if changed is not None:
            raise changed_alone(changed.name, self.sequence.behind)
