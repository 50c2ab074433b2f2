"""When gradients are reduced: the policy behind every `DistributedOptimizer`.

A *gradient set* is the parameters of one wrapped optimizer. A *round* reduces each of them once. It is FILLING from the
first gradient that is handed over until this rank has reported every member, then CLOSED until the results are final.

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
- A gradient that comes too late for a round under way (another backward pass, where the wait was left for later) is set
  aside and added to the reduced one. Each of these passes has a round that follows, as on ranks that wait in `backward()`.
- Gradients that the script has all cleared itself, before the first one of a backward pass, begin anew as with `zero_grad`.
- A gradient that was not computed by a watched backward pass counts when it is not the one that was reduced last. In the
  step (and in `synchronize()`), one that was written to since the step before counts too.
- A parameter that does not require a gradient is no member. It becomes one in the first round that finds it trainable.
- Until its set is learned, a gradient goes by itself, in memory that the framework stages. Then it goes into its slice of
  a bucket (`training/bucket_round.py`).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic

from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import Handle, WaitDeferred
from hvdlite.negotiation.layouts import first_round
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.bucket_round import BucketRound, BucketViews
from hvdlite.training.framework import Framework, Parameter, StagedGradient
from hvdlite.training.members import Member, MemberGradients
from hvdlite.training.order_errors import (
    changed_alone,
    computed_again_without,
    computed_twice,
    overwritten,
    reduction_told,
    replaced,
    sparse,
)
from hvdlite.training.phases import Phase, WaitIn
from hvdlite.training.replicas import check_replicas

_log = logging.getLogger("hvdlite")


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

    Attributes:
        looks_for_own: whether gradients are reduced with which a script has replaced reduced ones. Where reducing them again
            is not exact, that raises.
        by_bucket: whether the last round that began goes by learned buckets.
        on_reduced: called at the end of each round with the parameters whose gradients were reduced in it.
    """

    _moves_gradients = True  # what is handed over leaves the parameter until the round is over

    def __init__(self, runtime: Runtime, framework: Framework[Parameter], label: str, *, op: ReduceOp, prescale: float,
                 postscale: float, passes: int, process_set: int = GLOBAL_PROCESS_SET_ID,
                 wait_in: WaitIn = WaitIn.BACKWARD) -> None:
        members = runtime.members(process_set)
        self.is_shared = len(members) > 1 and runtime.world.rank in members  # else this rank trains alone
        self._process_set = process_set
        self._runtime = runtime
        self.framework = self._framework = framework
        self._label = label
        self._prefix = f"gradient.{label}."  # of the members' names
        self._op, self._prescale, self._postscale = op, prescale, postscale
        self._wait_in = wait_in
        self._waits_in_backward = wait_in is WaitIn.BACKWARD  # until such a wait has been deferred
        self._members: dict[int, Member[Parameter]] = {}  # by identity: framework tensors compare elementwise
        self._waiting_list: dict[int, Member[Parameter]] = {}  # frozen, or added in the middle of a round
        # Reduced by themselves in this round; None: as rows of a sparse gradient.
        self._alone: list[tuple[Member[Parameter], Handle, StagedGradient[Parameter] | None]] = []
        self._bucket_views: BucketViews[Parameter] | None = None  # for the layout last learned
        self._buckets: BucketRound[Parameter] | None = None  # the current round's, if it goes by buckets
        self.by_bucket = False
        self._phase = Phase.IDLE
        self._joins = runtime.joins
        # Of the current round. Ranks that joined early have had fewer, so it jumps when all have joined.
        self._number = first_round(self._joins) - 1
        self._steps = 0  # of the optimizer, since all ranks have last joined
        self._in_step = False  # the round is closed from within a step
        self._behind: set[int] = set()  # ranks that took part in this step's rounds from within their step
        self.gradients = MemberGradients(framework)
        self.looks_for_own = False
        self._rounds = 0  # ended since the gradients were last used or cleared
        self._passes_done = 0  # backward passes since the last round
        self._begin_lock = threading.Lock()  # hooks may come from several autograd threads; the first one begins the round
        self._wait_lock = threading.RLock()  # gradients may be read from several threads
        self._suspended = False
        self._touched = False  # some member was accumulated into in this period
        self.on_reduced: Callable[[Sequence[Parameter]], None] | None = None
        self._reduced: list[Parameter] = []  # in this round
        self._late: dict[int, Member[Parameter]] = {}  # accumulated into again while the round that has them is under way
        self._is_late_pass = False  # the backward pass that goes on came too late for the round under way
        self._late_passes = 0  # how many such passes have ended
        self.passes = passes
        if self.is_shared:
            weakref.finalize(self, runtime.retire, label, process_set).atexit = False

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and its results are not final yet."""
        return self._phase is not Phase.IDLE

    @property
    def has_reduced(self) -> bool:
        """Whether a round has ended since the last step."""
        return self._rounds > 0 and not self.is_under_way

    @property
    def has_late_passes(self) -> bool:
        """Whether gradients of backward passes that came too late for the last round wait for another one."""
        return self._late_passes >= self.passes and not self.is_under_way

    @property
    def parameters(self) -> Iterator[Parameter]:
        """The parameters of all members, and of those that become members after the round."""
        return (member.parameter for member in (*self._members.values(), *self._waiting_list.values())
                if self._framework.is_trainable(member.parameter))

    def change_framework(self, framework: Framework[Parameter]) -> None:
        """Between rounds: access gradients in another way, because they are in another memory now."""
        self.framework = self._framework = framework
        self.gradients.framework = framework
        self._bucket_views = None

    def add(self, parameter: Parameter, name: str, group_id: int = 0) -> None:
        """Take a parameter into the set, from the next round on in which it is trainable; the same ones on all ranks.

        Args:
            group_id: parameters with the same one, from 1, are reduced together.
        """
        self._waiting_list[id(parameter)] = Member(parameter, self._prefix + name, group_id)
        self.admit()

    def admit(self) -> None:
        """Take in the parameters that are trainable now, unless a round is under way; from any thread."""
        with self._begin_lock:
            if not self.is_under_way:
                self._admit()

    def hand_over(self, parameter: Parameter) -> None:
        """A backward pass has accumulated this parameter's gradient.

        Raises:
            GradientOrderError: when it was computed more often than `passes` times before the step.
        """
        member = self._members.get(id(parameter))
        if member is None:
            member = self._newcomer(parameter)
            if member is None:
                return
        if member.given == self._number and self.is_under_way:
            if member.missing != self._number and not self.gradients.is_idempotent:
                raise computed_twice(member.name, self._runtime.world.rank, self.passes, reduction_told(self._op))
            self._come_late(member)
            return
        gradients = self.gradients
        if gradients.has_marks and not self.is_under_way and gradients.were_cleared(self._members.values(), but=member):
            self._rounds = 0
            gradients.end_generation()
        if not gradients.is_idempotent and gradients.is_reduced(member):
            raise computed_twice(member.name, self._runtime.world.rank, self.passes, reduction_told(self._op))
        self._touched = True
        if member.period != gradients.period:
            member.period, member.passes = gradients.period, 0
        if self._suspended:
            return
        member.passes += 1
        if member.passes >= self.passes:
            if self._phase is Phase.IDLE:
                self._begin_round()
            self._give(member, self._framework.has_gradient(parameter))

    def end_backward(self) -> bool:
        """The outermost backward pass is over; return whether its caller is to `wait(deferrable=True)` now.

        Waiting is apart, because one backward pass can serve several sets: all of them must be closed before anybody waits,
        or two ranks could wait for each other's other set. While the round is under way afterwards, gradients are not final.
        """
        if self._suspended:
            return False
        if self._is_late_pass:
            self._is_late_pass = False
            self._late_passes += 1
        self._passes_done += 1
        if self._passes_done < self.passes:
            return False
        if self._wait_in is WaitIn.STEP:
            self._begin_round()  # where nothing has been handed over, gradients are not final either
            return False
        with self._wait_lock:
            self._close_round()
        return self._waits_in_backward

    def finish(self) -> None:
        """End the round: report what is missing, and wait until every gradient is final.

        Raises:
            HorovodInternalError: when a reduction failed; all others are completed first, and the next round can start.
        """
        with self._wait_lock:
            self._close_round()
            self.wait()
            for _ in range(self._late_passes // self.passes):  # not counted again: a round begins by forgetting them
                self._close_round()
                self.wait()

    def finish_under_way(self) -> None:
        """Like `finish`, when a round is under way."""
        with self._wait_lock:
            if self.is_under_way:
                self.finish()

    def wait(self, *, deferrable: bool = False) -> bool:
        """Wait until every gradient of the closed round is final; return False when the wait was deferred.

        May be called again after an interrupt, and by several threads. Raises like `finish`.

        Args:
            deferrable: whether the coordinator may end the wait early because ranks wait for each other in a circle. The
                round then stays under way.
        """
        errors: list[HvdliteError] = []
        with self._wait_lock:
            if not self.is_under_way:
                return True
            self._reduced = []
            self._set_late_aside(errors)
            try:
                self._collect(errors, deferrable)
            except WaitDeferred:
                if self._waits_in_backward:
                    self._waits_in_backward = False
                    _log.warning("rank %d: waiting for gradients in backward() made ranks wait for each other in a circle; "
                                 "'%s' waits in step() from now on, as with wait_in=\"step\"",
                                 self._runtime.world.rank, self._label)
                return False
            self._end_round()
            if self.on_reduced is not None and not errors:
                self.on_reduced(self._reduced)
            self._reduced = []
        if errors:
            raise errors[0]
        return True

    def finish_if_due(self, *, in_step: bool = False) -> None:
        """End a round that is under way, and take part in one if there was none since the last step.

        Args:
            in_step: whether the step that uses the gradients follows without the script being able to change them.

        Raises:
            GradientOrderError: when this rank changed gradients in between, and other ranks could not.
            HorovodInternalError: Like `finish`.
        """
        self.admit()
        if not self._members:
            return
        self._in_step = in_step
        try:
            if self._rounds == 0 or self.is_under_way or self.gradients.were_cleared(self._members.values()):
                self.finish()
            if in_step and self._behind:
                self._check_unchanged()
            if self._suspended:
                return
            if self._touched:
                self.finish()
            if (in_step or self.looks_for_own) and self._has_unreduced():
                self.gradients.takes_changed = True
                self.finish()
        finally:
            self._in_step = self.gradients.takes_changed = False

    def expect_round(self) -> None:
        """Gradients are computed anew now: a round is due before they are used, whatever this rank computes."""
        if not self.is_under_way:
            self._rounds = 0

    def withdraw(self) -> None:
        """While the round under way is left for later: keep further backward passes from writing to what it reduces."""
        if not (self.gradients.is_idempotent and self._moves_gradients):
            return  # further passes are errors, or what they add is reduced with the rest
        handed_over = [member for member, _, _ in self._alone]
        if self._phase is Phase.CLOSED:  # a wait that was deferred may have come to some of them
            handed_over += filter(self.gradients.is_reduced, self._members.values())
        for member in handed_over:
            if member.missing != self._number and id(member.parameter) not in self._late:
                self.gradients.withdraw(member)

    def notice_late(self) -> None:
        """After `withdraw`, in the middle of a backward pass: what it has computed so far comes too late for the round."""
        with self._wait_lock:
            if self.is_under_way and self.gradients.is_idempotent and self._moves_gradients:
                self._late.update((key, member) for key, member in self._members.items() if member.given == self._number
                                  and self.gradients.has_more(member, was_missing=member.missing == self._number))

    def unseen(self) -> list[Parameter]:
        """Return the parameters whose gradients the script has set, and that are reduced with the next round."""
        if self._suspended:
            return []
        return [member.parameter for member in self._members.values() if self.gradients.is_unseen(member)]

    def is_reduced(self, parameter: Parameter) -> bool:
        """Return whether the parameter's gradient is one that was reduced in this step (and changed since, perhaps)."""
        member = self._members.get(id(parameter))
        return member is not None and self.gradients.is_reduced(member)

    def is_current(self, parameter: Parameter) -> bool:
        """Return whether the parameter's gradient is the one that was reduced last, in whichever step, and nothing else."""
        member = self._members.get(id(parameter))
        return member is not None and self.gradients.is_current(member)

    def used_elsewhere(self, parameters: Iterable[Parameter]) -> None:
        """Another reducer's step has used these gradients, or they were cleared there: later ones are reduced anew."""
        members = [member for parameter in parameters if (member := self._members.get(id(parameter))) is not None]
        self.gradients.forget_reduced(members)
        if members:
            self.expect_round()

    def has_accumulated(self, parameter: Parameter) -> bool:
        """Return whether a backward pass has accumulated into the parameter's gradient since it was last reduced."""
        member = self._members.get(id(parameter))
        return member is not None and self.gradients.has_accumulated(member)

    def note_accumulated(self, parameter: Parameter) -> None:
        """Another reducer's backward pass has accumulated into the parameter's gradient, which is reduced here now."""
        member = self._members.get(id(parameter))
        if member is not None:
            self.gradients.count_pass(member)
            self._touched = True

    def stepped(self) -> None:
        """The optimizer has used the gradients; accumulating onto them is the user's business again."""
        self._steps += 1
        self._runtime.progress.round()
        self.cleared()

    def cleared(self) -> None:
        """The gradients were cleared: what was computed so far does not count, so a round is due before the next step."""
        self.finish_under_way()
        self._rounds = 0
        self._behind.clear()
        self.gradients.end_generation()
        self._touched = self._is_late_pass = False
        self._passes_done = 0

    def zeroed(self) -> None:
        """After `cleared`: the gradients were set to zero, in place, which does not make them the script's own."""
        self.gradients.renew(self._members.values())

    def check_replicas(self, named: Sequence[tuple[str, Array]]) -> None:
        """Compare the parameters of all ranks that take part; see `training.replicas`."""
        check_replicas(self._runtime, named, f"{self._label}.check", self._process_set)

    def set_passes(self, passes: int) -> None:
        """Change the number of accumulated backward passes, from the next round on."""
        self.passes = passes
        self.cleared()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Accumulate locally; the first backward pass after it reduces everything."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def _admit(self) -> None:
        """Between rounds: take in the parameters that are trainable now."""
        admitted = [key for key, member in self._waiting_list.items() if self._framework.is_trainable(member.parameter)]
        for key in admitted:
            self._members[key] = self._waiting_list.pop(key)
        if admitted:
            self._bucket_views = None  # a layout learned before does not describe the set any more

    def _newcomer(self, parameter: Parameter) -> Member[Parameter] | None:
        """Return the member for a parameter that has its first gradient; None when it has to wait for the round's end."""
        self.admit()
        if id(parameter) not in self._members:
            self._is_late_pass = True
        return self._members.get(id(parameter))

    def _begin_round(self) -> None:
        with self._begin_lock:
            if not self.is_under_way:
                self._begin()
                self._phase = Phase.FILLING

    def _begin(self) -> None:
        self._next_number()
        learned = self._runtime.layout(self._label, self._number)
        self.by_bucket = False
        if learned is None:
            if not self._runtime.is_suspended(self._label):  # else gradients may lie in bucket views that are used again
                self._bucket_views = None
            return
        if self._bucket_views is None or self._bucket_views.learned is not learned:
            for member in self._members.values():
                member.sparse = member.sparse or member.name in learned.layout.unbucketed
            self._bucket_views = BucketViews.of(learned, self._framework,
                                       {member.name: member.parameter for member in self._members.values()
                                        if not member.sparse})
        if self._bucket_views is None:
            self._runtime.mark_stale(learned.layout)
        else:
            self.by_bucket = True
            closes = not any(member.sparse for member in self._members.values())
            self._buckets = BucketRound(self._runtime, self._framework, self._bucket_views, self._number, self._steps,
                                        closes=closes)

    def _next_number(self) -> None:
        self._admit()
        self._is_late_pass, self._late_passes = False, 0
        if self._joins != self._runtime.joins:
            self._joins = self._runtime.joins
            self._number = first_round(self._joins) - 1
            self._steps = 0
        self._number += 1

    def _close_round(self) -> None:
        """Hand over, or report as missing, whatever has not been handed over; nothing when the round is closed."""
        if self._phase is Phase.CLOSED:
            return
        self._begin_round()
        for member in self._members.values():
            if member.given != self._number:
                self._give(member, self._is_present(member))
        if self._alone or self._buckets is None:
            self._runtime.close_round(self._label, self._number, self._process_set)
        self._closed()

    def _closed(self) -> None:
        self._phase = Phase.CLOSED
        self._rounds += 1
        self._passes_done = 0
        self._touched = False

    def _is_present(self, member: Member[Parameter]) -> bool:
        """Return whether a member that was not handed over takes part in the round with its gradient."""
        return self.gradients.is_present(member)

    def _has_unreduced(self) -> bool:
        """Return whether a gradient is about to be used that no backward pass handed over."""
        members = self._members.values()
        if self.gradients.have_unreduced(members):
            return True
        other = self.gradients.replaced(members) if self.looks_for_own else None
        if other is not None and not self.gradients.is_idempotent:
            raise replaced(other.name, self._runtime.world.rank, reduction_told(self._op))
        return other is not None

    def _come_late(self, member: Member[Parameter]) -> None:
        """A gradient was accumulated into after the round under way got it (or was told that there is none)."""
        self._late[id(member.parameter)] = member
        if not self._suspended:
            self._is_late_pass = True

    def _set_late_aside(self, errors: list[HvdliteError]) -> None:
        """Before results become gradients: keep what was accumulated since."""
        if not self._late:
            return
        for member, _, staged in self._alone if self._moves_gradients else ():
            if id(member.parameter) in self._late and staged is not None and self._framework.is_staged(staged):
                del self._late[id(member.parameter)]
                errors.append(overwritten(member.name, self._runtime.world.rank))
        late = list(self._late.values())
        self._late.clear()
        for member in late:
            if self._moves_gradients or member.missing == self._number:
                self.gradients.set_aside(member)

    def _give(self, member: Member[Parameter], present: bool) -> None:
        """Hand a member over, with or without a gradient."""
        buckets = self._buckets
        if buckets is None or member.sparse:
            self._declare(member, present)
        else:
            is_own = not present and self.gradients.is_own(member)
            for parameter, has_gradient in buckets.give(member.parameter, present, self._in_step):
                self._declare(self._members[id(parameter)], has_gradient)
            while buckets.detached:
                _, mark = buckets.detached.pop()  # of this member
                member.mark = None if is_own else mark
        member.given = self._number
        if not present:
            member.missing = self._number

    def _declare(self, member: Member[Parameter], present: bool) -> None:
        """Let a member go by itself."""
        if present and self.gradients.is_again(member):
            member.again = self._number
        moment = Moment(self._label, self._number, self._steps, self._in_step)
        if present and self._framework.is_sparse(member.parameter):
            rows = self._framework.rows(member.parameter)
            handle = self._runtime.declare_rows(member.name, rows, moment, process_set=self._process_set)
            self._alone.append((member, handle, None))
            return
        staged = self._framework.stage(member.parameter) if present else self._framework.stage_empty(member.parameter)
        handle = self._runtime.declare(
            member.name, staged.array if present else None, staged.array, self._op, moment,
            prescale=self._prescale, postscale=self._postscale, strides=self._framework.shape(member.parameter).strides,
            group_id=member.group_id, process_set=self._process_set)
        self._alone.append((member, handle, staged))

    def _collect(self, errors: list[HvdliteError], deferrable: bool) -> None:
        """Wait for every handle of the round, and make the results the parameters' gradients."""
        if self._buckets is not None:
            for reduced, marks in self._buckets.wait(errors, deferrable):
                self._mark_all([self._members[id(parameter)] for parameter, _ in reduced], marks)
            for parameter, rows in self._buckets.gathered:
                self._take_rows(self._members[id(parameter)], rows, errors)
            self._note_behind(self._buckets.behind)
        for member, handle, staged in self._alone:
            try:
                result = handle.wait(deferrable=deferrable)
            except HvdliteError as error:
                errors.append(error)
                continue
            if handle.completion is not None:
                self._framework.follow(handle.completion)
            self._note_behind(handle.behind)
            if member.again == self._number:
                self._check_all_contributed(member, handle.contributors, errors)
            if staged is None or result is not staged.array:
                self._take_rows(member, result, errors)
            elif handle.contributors:
                self._mark_all([member], [self._framework.unstage(staged)])

    def _check_all_contributed(self, member: Member[Parameter], ranks: Collection[int], errors: list[HvdliteError]) -> None:
        """Without some ranks' reduced gradients, an average of reduced gradients is too small."""
        others = set(self._runtime.members(self._process_set)) - set(ranks)
        if others:
            errors.append(computed_again_without(member.name, others))

    def _end_round(self) -> None:
        self._buckets = None
        self._alone.clear()
        self._phase = Phase.IDLE
        self.gradients.end_period()
        if self.gradients.put_back():
            self._touched = True

    def _note_behind(self, ranks: Collection[int]) -> None:
        if not self._in_step:  # else nothing can be changed before this rank steps either
            self._behind.update(ranks)

    def _take_rows(self, member: Member[Parameter], rows: Array, errors: list[HvdliteError]) -> None:
        if self._op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            errors.append(sparse(member.name, self._op))
            return
        divisor = len(self._runtime.members(self._process_set)) if self._op is ReduceOp.AVERAGE else 1
        mark = self._framework.give_rows(member.parameter, rows, self._prescale * self._postscale / divisor)
        self._mark_all([member], [mark])
        if not member.sparse:
            member.sparse = True
            self._bucket_views = None

    def _mark_all(self, members: Sequence[Member[Parameter]], marks: Sequence[Any]) -> None:
        self.gradients.mark_all(members, marks)
        if self.on_reduced is not None:
            self._reduced += [member.parameter for member in members]

    def _check_unchanged(self) -> None:
        changed = self.gradients.changed(self._members.values())
        if changed is not None:
            raise changed_alone(changed.name, self._behind)
