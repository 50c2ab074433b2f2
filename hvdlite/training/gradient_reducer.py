"""When gradients are reduced: the policy behind every `DistributedOptimizer`.

A *declared set* is the parameters of one wrapped optimizer. A *round* reduces each of them once. Rules (PROTOCOL rules 7, 8)
- A gradient is handed over by its hook, as soon as it has been accumulated `passes` times: communication overlaps the
  rest of the backward pass.
- A round ends at the end of the outermost backward pass: what was not handed over is *missing*, and the results are
  waited for. So whatever reads gradients afterwards (clipping, unscaling, `step`) sees reduced values.
- Every rank takes part in every round. A rank that steps without a backward pass takes part with everything missing.
- A parameter to which nobody contributed keeps what it has (None): momentum and weight decay do not move it.
- Accumulating onto a reduced gradient would count it twice, so that is an error, unless the gradient was cleared.
- Until its set is learned, a gradient goes by itself, in memory lent by the framework. Afterwards it goes into its place of
  a bucket (`training/bucket_round.py`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic

from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.handle import Handle
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.bucket_round import BucketRound, Seating
from hvdlite.training.framework import Framework, Loan, Parameter
from hvdlite.training.replicas import check_replicas


class GradientOrderError(HvdliteError, AssertionError):
    """Raised when a gradient is computed again although its round is over or under way (Horovod: AssertionError)."""


@dataclasses.dataclass(slots=True, eq=False)
class _Member(Generic[Parameter]):
    """One parameter of the set.

    Its state is tagged with the reducer's counters, so that a new round forgets it without visiting every member.
    """

    parameter: Parameter
    name: str
    cluster: int  # with whom it shares a bucket; 0: with whomever
    period: int = 0  # the last period in which it was accumulated into
    passes: int = 0  # how often in that period
    given: int = 0  # the last round in which it was handed over
    sparse: bool = False  # some rank had a sparse gradient for it once: it always goes by itself
    mark: Any = None  # identifies the reduced gradient
    marked: int = -1  # the generation in which `mark` counts


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
    """

    def __init__(self, runtime: Runtime, framework: Framework[Parameter], label: str, *, op: ReduceOp, prescale: float,
                 postscale: float, passes: int, process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
        members = runtime.members(process_set)
        self.is_shared = len(members) > 1 and runtime.world.rank in members  # else this rank trains alone
        self._process_set = process_set
        self._runtime = runtime
        self.framework = self._framework = framework
        self._label = label
        self._op, self._prescale, self._postscale = op, prescale, postscale
        self._members: dict[int, _Member[Parameter]] = {}  # by identity: framework tensors compare elementwise
        # Reduced by themselves in this round; without a loan, as rows of a sparse gradient.
        self._alone: list[tuple[_Member[Parameter], Handle, Loan[Parameter] | None]] = []
        self._seating: Seating[Parameter] | None = None  # for the layout last learned
        self._buckets: BucketRound[Parameter] | None = None  # the current round's, if it goes by buckets
        self._number = 0  # of the current round; ranks that joined early have had fewer, so it jumps when all have joined
        self._joins = runtime.joins
        self._under_way = False
        self._period = 1  # grows when what was accumulated has been reduced, or is cleared
        self._generation = 0  # grows when gradients are cleared or stepped with
        self._rounds = 0  # ended since the last step
        self._passes_done = 0  # backward passes since the last round
        self._begin_lock = threading.Lock()  # hooks may come from several autograd threads; the first one begins the round
        self._suspended = False
        self._touched = False  # some member was accumulated into in this period
        self.passes = passes

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and is not waited for yet."""
        return self._under_way

    @property
    def has_reduced(self) -> bool:
        """Whether a round has ended since the last step."""
        return self._rounds > 0 and not self._under_way

    def add(self, parameter: Parameter, name: str, cluster: int = 0) -> None:
        """Take a parameter into the set; the same ones on all ranks. Those of one cluster, from 1, are reduced together."""
        self._members[id(parameter)] = _Member(parameter, f"gradient.{self._label}.{name}", cluster)
        self._seating = None  # a layout learned before does not describe the set any more

    def hand_over(self, parameter: Parameter) -> None:
        """A backward pass has accumulated this parameter's gradient.

        Raises:
            GradientOrderError: when it was computed more often than `passes` times before the step.
        """
        member = self._members[id(parameter)]
        if (self._under_way and member.given == self._number) or (
                member.marked == self._generation and self._framework.is_marked(parameter, member.mark)):
            raise GradientOrderError(
                f"'{member.name}' was computed more than backward_passes_per_step={self.passes} times before "
                "optimizer.step() or zero_grad(): its gradient is already reduced, and adding to it would count the other "
                "ranks twice. Raise backward_passes_per_step, use optimizer.no_sync() for all but the last backward pass, "
                "or add the losses before one backward()")
        self._touched = True
        if member.period != self._period:
            member.period, member.passes = self._period, 0
        if self._suspended:
            return
        member.passes += 1
        if member.passes >= self.passes:
            if not self._under_way:
                self._begin_round()
            self._give(member, self._framework.has_gradient(parameter))

    def end_backward(self) -> bool:
        """The outermost backward pass is over; return whether the round has ended and is to be waited for.

        Waiting is apart, because one backward pass can serve several sets: all of them must have said everything before
        anybody waits, or two ranks could wait for each other's other set.
        """
        if self._suspended:
            return False
        self._passes_done += 1
        if self._passes_done < self.passes:
            return False
        self._close_round()
        return True

    def finish(self) -> None:
        """Like `_close_round` and `wait`."""
        self._close_round()
        self.wait()

    def wait(self) -> None:
        """Wait until every gradient of the closed round is final.

        Raises:
            HorovodInternalError: when a reduction failed; all others are completed first, and the next round can start.
        """
        errors: list[HvdliteError] = []
        if self._buckets is not None:
            for parameter, mark in self._buckets.wait(errors):
                self._mark(self._members[id(parameter)], mark)
            for parameter, rows in self._buckets.gathered:
                self._take_rows(self._members[id(parameter)], rows)
        for member, handle, loan in self._alone:
            try:
                result = handle.wait()
            except HvdliteError as error:
                errors.append(error)
                continue
            if handle.completion is not None:
                self._framework.follow(handle.completion)
            if loan is None or result is not loan.array:
                self._take_rows(member, result)
            elif handle.contributors:
                self._mark(member, self._framework.give_back(loan))
        self._buckets = None
        self._alone.clear()
        self._touched = self._under_way = False
        self._period += 1
        if errors:
            raise errors[0]

    def finish_if_due(self) -> None:
        """Before a step: end a round that is under way, and take part in one if there was none."""
        if self._members and (self._rounds == 0 or self._under_way or (self._touched and not self._suspended)):
            self.finish()

    def stepped(self) -> None:
        """The optimizer has used the gradients; accumulating onto them is the user's business again."""
        self._rounds = 0
        self._runtime.progress.round()
        self.cleared()

    def cleared(self) -> None:
        """The gradients were cleared: what was computed so far does not count."""
        if self._under_way:
            self.finish()
        self._generation += 1
        self._period += 1
        self._touched = False
        self._passes_done = 0

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

    def _begin_round(self) -> None:
        with self._begin_lock:
            if not self._under_way:
                self._begin()
                self._under_way = True

    def _begin(self) -> None:
        if self._joins != self._runtime.joins:
            self._joins = self._runtime.joins
            self._number = self._joins << 32
        self._number += 1
        learned = self._runtime.layout(self._label, self._number)
        if learned is None:
            self._seating = None
            return
        if self._seating is None or self._seating.learned is not learned:
            self._seating = Seating.of(learned, self._framework,
                                       {member.name: member.parameter for member in self._members.values()
                                        if not member.sparse})
        if self._seating is None:
            self._runtime.abandon(learned.layout)
        else:
            closes = not any(member.sparse for member in self._members.values())
            self._buckets = BucketRound(self._runtime, self._framework, self._seating, self._number, closes=closes)

    def _close_round(self) -> None:
        """Hand over, or report as missing, whatever has not been handed over."""
        if not self._under_way:
            self._begin_round()
        for member in self._members.values():
            if member.given != self._number:
                self._give(member, member.period == self._period and self._framework.has_gradient(member.parameter))
        if self._alone or self._buckets is None:
            self._runtime.close_round(self._label, self._number, self._process_set)
        self._rounds += 1
        self._passes_done = 0

    def _give(self, member: _Member[Parameter], present: bool) -> None:
        """Hand a member over, with or without a gradient."""
        if self._buckets is None or member.sparse:
            self._declare(member, present)
        else:
            for parameter, has_gradient in self._buckets.give(member.parameter, present):
                self._declare(self._members[id(parameter)], has_gradient)
        member.given = self._number

    def _declare(self, member: _Member[Parameter], present: bool) -> None:
        """Let a member go by itself."""
        if present and self._framework.is_sparse(member.parameter):
            rows = self._framework.rows(member.parameter)
            handle = self._runtime.declare_rows(member.name, rows, self._label, self._number, process_set=self._process_set)
            self._alone.append((member, handle, None))
            return
        loan = self._framework.lend(member.parameter) if present else self._framework.lend_empty(member.parameter)
        handle = self._runtime.declare(
            member.name, loan.array if present else None, loan.array, self._op, self._label, self._number,
            prescale=self._prescale, postscale=self._postscale, strides=self._framework.shape(member.parameter).strides,
            cluster=member.cluster, process_set=self._process_set)
        self._alone.append((member, handle, loan))

    def _take_rows(self, member: _Member[Parameter], rows: Array) -> None:
        if self._op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise UnsupportedError(f"'{member.name}' has a sparse gradient, which has no {self._op.name.capitalize()}; use "
                                   "Average or Sum, or sparse_as_dense=True")
        divisor = len(self._runtime.members(self._process_set)) if self._op is ReduceOp.AVERAGE else 1
        mark = self._framework.give_rows(member.parameter, rows, self._prescale * self._postscale / divisor)
        self._mark(member, mark)
        if not member.sparse:
            member.sparse = True
            self._seating = None

    def _mark(self, member: _Member[Parameter], mark: Any) -> None:
        member.mark, member.marked = mark, self._generation
