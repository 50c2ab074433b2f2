"""The reducer behind every `DistributedOptimizer`: it takes gradients as they are computed, in one round after the other.

A *gradient set* is the parameters of one wrapped optimizer. A *round* reduces each of them once. It is open from the first
gradient that is given until this rank has given every member, then closed until the results are final.

The way of a gradient: `Reducer.accumulated` -> `Bucket.fill` -> `Places.fill`, and when the bucket is full
`GradientSets.enqueue_bucket`; back, `Reducer.wait` -> `Bucket.finish` -> `Places.results`. What may happen to it is in the
tables of `members.py`, what may happen to a round in that of `round.py`; `before_step.py` has what is asked before gradients
are used. docs/journey.md follows one gradient.

Rules (docs/protocol.md#rounds, #final-gradients, #same-step, #reduced-again)
- A gradient is given by its hook, as soon as it has been accumulated `passes` times. It leaves the parameter until the round
  is over, so nobody writes to what others read.
- With `WaitIn.BACKWARD` the outermost backward pass closes the round (a member that was not given is *unused*) and waits for
  the results. With `WaitIn.STEP` the optimizer's step does both, or whatever reads a gradient first.
- The wait in a backward pass can be *deferred*: the coordinator does so when ranks wait for each other in a circle. The
  round is then waited for where a gradient is read. The framework makes sure that nobody reads one earlier.
- Every rank takes part in every round, and all make the same number of them between two steps: each backward pass has one
  (`PassCounter`), and a rank that steps without one takes part with everything unused.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from typing import Generic

from hvdlite.core.errors import HvdliteError, MismatchError, UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import WaitDeferred, WaitLeftToCaller
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.bucket import FILLING, Bucket, BucketOfOne
from hvdlite.training.gradients.errors import GradientOrderError, computed_after_round, computed_twice, weighed_late
from hvdlite.training.gradients.framework import Framework, Parameter
from hvdlite.training.gradients.gradient_set import GradientSet
from hvdlite.training.gradients.members import AGAIN, READY, REDUCED, TRAILING, UNUSED, Member, Members, Origin, set_held
from hvdlite.training.gradients.round import BucketPlans, LaterCall, MakeBucket, PassCounter, Round, WaitIn
from hvdlite.training.gradients.weights import RankWeights

_log = logging.getLogger("hvdlite")
JOB_CONTINUES = (GradientOrderError, MismatchError, UnsupportedError)
"""Errors of a round, perhaps on one rank only, after which ranks make further rounds."""


class Reducer(Generic[Parameter]):
    """Reduces the gradients of one wrapped optimizer.

    Args:
        framework: gives access to gradients.
        label: makes names unique among the wrapped optimizers of this process; equal on all ranks.
        op: AVERAGE or SUM (or MIN, MAX).
        prescale, postscale: factors before and after the reduction.
        passes: backward passes whose gradients are accumulated before each reduction.
        process_set: id of the ranks that take part; other ranks train alone.
        wait_in: where the results are waited for.
        make_bucket: for communication hooks. Default: buckets that the runtime reduces.
        is_idempotent: whether reducing a reduced gradient again leaves it as it is.
    """

    def __init__(self, runtime: Runtime, framework: Framework[Parameter], label: str, *, op: ReduceOp, prescale: float,
                 postscale: float, passes: int, process_set: int = GLOBAL_PROCESS_SET_ID, wait_in: WaitIn = WaitIn.BACKWARD,
                 make_bucket: MakeBucket[Parameter] | None = None, is_idempotent: bool = False) -> None:
        ranks = runtime.members(process_set)
        self.is_shared = len(ranks) > 1 and runtime.world.rank in ranks  # otherwise this rank trains alone
        self.runtime = runtime
        self.rank = runtime.world.rank
        self.framework = framework
        self.set = GradientSet(runtime, framework, label, op, prescale, postscale, process_set)
        self.members: Members[Parameter] = Members(framework, f"gradient.{label}.", is_idempotent)
        self.is_idempotent = is_idempotent
        self.passes = PassCounter(passes)
        self.closes_in_backward = wait_in is WaitIn.BACKWARD  # the end of a backward pass closes the round
        self.set.blocks = self.closes_in_backward  # and waits for the results; not after a wait was deferred
        self.round: Round[Parameter] | None = None  # the one under way
        self.layout: BucketPlans[Parameter] = BucketPlans(make_bucket)
        self.is_due = True  # a round is due before gradients are used
        self.has_local = False  # some member was accumulated into since the last round
        self.has_reduced = False  # some members may be REDUCED or AGAIN
        self.ranks_in_step: set[int] = set()  # ranks that took part in rounds since the last step from within theirs
        self.written_too = False  # what was written to gradients since they were reduced for an older step counts
        self.later_call: LaterCall | None = None  # of a step's closure, while there is one
        self.lock = threading.RLock()  # while a round is closed or waited for: gradients may be read from several threads
        self._begin_lock = threading.RLock()  # hooks may come from several autograd threads; the first one begins the round
        if self.is_shared:
            weakref.finalize(self, runtime.gradients.retire, label, process_set).atexit = False

    def add(self, parameter: Parameter, name: str, group_id: int = 0) -> None:
        """Take a parameter into the set, from the next round on in which it is trainable; the same ones on all ranks.

        Args:
            group_id: parameters with the same one, from 1, are reduced together.
        """
        if id(parameter) not in self.members.by_key:  # scripts move parameters between groups
            self.members.waiting.setdefault(id(parameter), Member(parameter, self.members.prefix + name, group_id))
        self.admit()

    def admit(self) -> None:
        """Take in the parameters that are trainable now, unless a round is under way."""
        with self._begin_lock:
            if self.round is None and self.members.admit():
                self.layout.forget()  # it does not describe the set any more

    def weigh(self) -> RankWeights:
        """Weight averages by what ranks count, from the next round on; all ranks do so before the same round.

        Raises `GradientOrderError` when a gradient was accumulated before, without a weight.
        """
        if not self.set.weights.are_used:
            if self.round is not None or self.has_local:
                raise weighed_late(self.set.label, self.rank)
            self.is_idempotent = self.members.is_idempotent = False
            self.set.weigh()
            self.layout.forget()
        return self.set.weights

    def member(self, parameter: Parameter) -> Member[Parameter] | None:
        """Return the member that a parameter is; None when it is none, or not before the round is over."""
        key = id(parameter)
        if key in self.members.waiting:
            self.admit()
        return self.members.by_key.get(key)

    def accumulated(self, parameter: Parameter) -> None:
        """A backward pass has accumulated this parameter's gradient.

        Raises:
            GradientOrderError: when it was computed more often than `passes` times before the step.
        """
        member = self.members.by_key.get(id(parameter)) or self.member(parameter)
        passes = self.passes
        if member is None:
            passes.note_trailing()  # its gradient counts in the next round
            return
        current, state = self.round, member.state
        if state is READY or state is UNUSED or state is TRAILING:
            assert current is not None
            if not self.members.note_trailing(member, current.trailing):
                raise self._computed_twice(member)
            passes.note_trailing()
            return
        if current is None and self.has_reduced and self.members.were_cleared(member):
            self.forget()
        state = self.members.accumulated(member)
        if state is REDUCED:
            raise self._computed_twice(member)
        self.has_local = True
        if passes.is_suspended:
            return
        member.passes += 1
        if member.passes >= passes.per_round:
            if current is None:
                current = self.begin()
            member.held = self.framework.get(parameter)
            if member.held is None:
                self._leave_out(current, member, Origin.NONE)
            else:
                self._hand_over(current, member, is_again=state is AGAIN)

    def accumulated_small(self, keys: Set[int]) -> Set[int]:
        """Like `ready`, for all small members of buckets at once; return the parameters that are given.

        Args:
            keys: parameters, by identity, whose gradients a backward pass has accumulated once.
        """
        passes, taken = self.passes, set[int]()
        if passes.is_suspended or passes.per_round > 1 or self.has_reduced:
            return taken
        current = self.begin()
        for bucket in current.buckets:
            taken |= bucket.fill_small(keys)
        self.has_local = self.has_local or bool(taken)
        return taken

    def end_pass(self) -> bool:
        """The outermost backward pass is over; return whether its caller is to `wait_and_make_due` now.

        Waiting is apart, because one backward pass can serve several sets: all of them must be closed before anybody waits,
        or two ranks could wait for each other's other set. While the round is under way afterwards, gradients are not final.
        """
        if self.passes.is_suspended:
            return False
        self.passes.end(joins_round=not self.closes_in_backward)
        if not self.passes.are_due:
            return False
        if not self.closes_in_backward:
            self.begin()  # where nothing has been given, gradients are not final either
            return False
        self.close()
        return self.set.blocks

    def fail_pass(self) -> None:
        """A backward pass has failed: the round that it began, if it did, is also that of the pass that follows."""
        if self.round is not None and not self.round.is_closed and not self.passes.are_due:
            self.round.of_failed_pass = True

    def suspended(self) -> AbstractContextManager[None]:
        """Accumulate locally; the first backward pass after it reduces everything."""
        return self.passes.suspended()

    def begin(self) -> Round[Parameter]:
        """Return the round under way; begin one if there is none."""
        with self._begin_lock:
            if self.round is None:
                self.admit()
                self.set.begin_round()
                current: Round[Parameter] = Round(self.set.round_id)
                current.buckets = self.layout.buckets(self.set, self.members, current.alone)
                self.round = current
            return self.round

    def close(self) -> None:
        """Give whatever has not been given, or report it as unused; nothing when the round is closed."""
        with self.lock:
            current = self.begin()
            if current.is_closed:
                return
            if self.later_call is not None:
                self.later_call.decide(self.members, accumulates=current.has_again)
            for member in [member for member in self.members if member.state is not READY]:
                if member.state is not UNUSED and member.state is not TRAILING:
                    self._hand_over_rest(current, member)
            if self.layout.make_bucket is not None:
                current.buckets[0].send()
            current.send_weights(self.set)
            current.is_closed = True
            if current.alone:
                self.runtime.gradients.close_round(self.set.label, current.id, self.set.process_set_id)
            self.is_due = self.has_local = False
            self.passes.reduce(of_failed_pass=current.of_failed_pass)

    def wait(self, *, deferrable: bool = False) -> bool:
        """Wait until every gradient of the closed round is final; return False when the wait was deferred.

        May be called again after an interrupt. Raises like `finish`.

        Args:
            deferrable: whether the wait may end early: the coordinator ends it if ranks wait for each other in a circle, and
                a thread that cannot be interrupted leaves a long one to another thread. The round then stays under way.
        """
        with self.lock:
            current = self.round
            if current is None:
                return True
            self.members.hold_trailing(current.trailing)
            buckets = [*current.buckets, *current.alone]
            try:
                for bucket in buckets:
                    bucket.finish(deferrable)
            except WaitLeftToCaller:
                return False
            except WaitDeferred:
                if self.set.blocks:
                    _log.warning("rank %d: waiting for gradients in backward() made ranks wait for each other in a circle; "
                                 "'%s' waits in step() from now on, as with wait_in=\"step\"", self.rank, self.set.label)
                self.set.blocks = False
                return False
            except BaseException:
                if any(bucket.is_over for bucket in buckets):
                    self._end(current, buckets)
                raise
            errors = self._end(current, buckets)
        if errors:
            raise errors[0]
        return True

    def finish(self, only: Round[Parameter] | None = None) -> None:
        """End the round that is under way, if there is one: report what is unused, and wait; see `make_round`.

        Args:
            only: the round that is to be finished; nothing is done when it is over.
        """
        with self.lock:
            if self.round is not None and only in (None, self.round):
                self.make_round()

    def make_round(self) -> None:
        """Close the round, or make one, and wait until every gradient is final; then make the rounds that are due.

        Raises:
            HorovodInternalError: when a reduction failed; all others are completed first, and the rounds that are due are
                made, as on other ranks, where perhaps nothing has failed.
        """
        with self.lock:
            self.close()
            self.wait_and_make_due(deferrable=False)

    def wait_and_make_due(self, *, deferrable: bool) -> None:
        """Like `make_round`, when the round is closed; unless its wait is deferred, see `wait`."""
        errors: list[HvdliteError] = []
        with self.lock:
            while True:
                try:
                    if not self.wait(deferrable=deferrable):
                        return
                except JOB_CONTINUES as error:
                    errors.append(error)
                if not self.passes.are_due:
                    break
                self.close()
                deferrable = False
        if errors:
            raise errors[0]

    def notice_trailing(self, current: Round[Parameter]) -> None:
        """In the middle of a backward pass: what it has computed so far does not count in the round that is under way."""
        with self.lock:
            if self.round is current and self.is_idempotent:
                for member in self.members:
                    if (member.state is READY or member.state is UNUSED) and self.members.gradient(member) is not None:
                        self.members.note_trailing(member, current.trailing)

    def abandon(self) -> None:
        """The runtime has ended: the round under way is over without results, and learned buckets are let go of."""
        self.round = self.later_call = None
        self.members.forget()
        self.layout.forget()

    def forget(self) -> None:
        """The gradients were used or cleared: what was computed so far does not count, and a round is due."""
        if self.has_local or self.has_reduced:  # else all are IDLE: most are, after the step
            self.members.forget()
        self.is_due = True
        self.has_local = self.has_reduced = False
        self.passes.clear()
        self.set.weights.clear()

    def check_invariants(self) -> None:
        """Between any two calls; for tests."""
        current = self.round
        self.members.check(is_under_way=current is not None, is_closed=current is not None and current.is_closed,
                           has_local=self.has_local, has_reduced=self.has_reduced)
        if current is not None and current.is_closed:
            assert not any(bucket.state is FILLING for bucket in (*current.buckets, *current.alone))

    def _computed_twice(self, member: Member[Parameter]) -> GradientOrderError:
        return computed_twice(member.name, self.rank, self.passes.per_round, self.set.reduction)

    def _hand_over_rest(self, current: Round[Parameter], member: Member[Parameter]) -> None:
        """Give a member that no backward pass has given, or leave it out, by its gradient's origin."""
        member.held = self.members.gradient(member)
        origin = self.members.origin(member, member.held)
        if self.members.counts(member.held, origin, self.written_too):
            is_again = origin is Origin.AGAIN or origin is Origin.REDUCED
            self._hand_over(current, member, is_again=is_again, is_own=origin is not Origin.NEW and not is_again)
        else:
            self._leave_out(current, member, origin)

    def _hand_over(self, current: Round[Parameter], member: Member[Parameter], is_again: bool, is_own: bool = False) -> None:
        """Let a member's gradient, which it holds, be reduced."""
        current.has_again = current.has_again or is_again
        self.members.hand_over(member, is_again=is_again)
        if member.bucket >= 0 and current.buckets:
            current.buckets[member.bucket].fill(member, is_own)
        else:
            self._send_alone(current, member, counts=True)

    def _leave_out(self, current: Round[Parameter], member: Member[Parameter], origin: Origin) -> None:
        """Report a member as unused; the gradient that it holds, if any, does not count."""
        old = id(member.held)  # no reference: its place is to be free
        self.members.leave_out(member)
        if member.bucket >= 0 and current.buckets:
            current.buckets[member.bucket].leave_out(member)
        else:
            self._send_alone(current, member, counts=False)
        if id(member.held) != old:  # a copy, which is no new gradient either
            self.members.note_last(member, member.held, is_written=origin is Origin.REWRITTEN)

    def _send_alone(self, current: Round[Parameter], member: Member[Parameter], *, counts: bool) -> None:
        try:
            current.alone.append(BucketOfOne(self.set, member, counts=counts))
        except BaseException:  # it is not sent, and so not given
            self.members.take_back(member)
            raise

    def _end(self, current: Round[Parameter], buckets: Sequence[Bucket[Parameter]]) -> list[HvdliteError]:
        """The round is over: set the gradients of parameters. Return the errors."""
        members, errors = self.members, list[HvdliteError]()
        for bucket in buckets:
            errors += bucket.errors
            current.ranks_in_step.update(bucket.ranks_in_step)
            current.check_contributors(bucket, self.runtime.members(self.set.process_set_id))
            if current.factor is None:
                bucket.drop()
            elif bucket.reduced:
                self.has_reduced = True
                members.finish(bucket.reduced, bucket.gradients, current.factor)
            for member in bucket.rest:
                members.take_back(member)
            set_held(bucket.holding, itertools.repeat(None))
        if not self.set.in_step:  # else nothing can be changed before this rank steps either
            self.ranks_in_step |= current.ranks_in_step
        self.round = None
        added, dropped = members.add_trailing(current.trailing)
        self.has_local = self.has_local or bool(added)
        errors += [computed_after_round(member.name, self.rank, self.set.reduction) for member in dropped]
        if self.later_call is not None:
            self.later_call.incomplete = self.later_call.incomplete or current.incomplete
        elif current.incomplete is not None:
            errors.append(current.incomplete)
        return errors
