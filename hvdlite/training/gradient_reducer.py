"""When gradients are reduced: the policy behind every `DistributedOptimizer`.

A *set* is the parameters of one wrapped optimizer. A *round* reduces each of them once. Rules (PROTOCOL rule 8)
- A gradient is handed over by its hook, as soon as it has been accumulated `passes` times: communication overlaps the
  rest of the backward pass.
- A round ends at the end of the outermost backward pass: what was not handed over is reported *absent*, and the results
  are waited for. So whatever reads gradients afterwards (clipping, unscaling, `step`) sees reduced values.
- Every rank takes part in every round. A rank that steps without a backward pass takes part with everything absent.
- A parameter to which nobody contributed keeps what it has (None): momentum and weight decay do not move it.
- Accumulating onto a reduced gradient would count it twice, so that is an error, unless the gradient was cleared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic

from hvdlite.core.errors import HvdliteError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.handle import Handle
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.framework import Framework, Loan, Parameter


class GradientOrderError(HvdliteError, AssertionError):
    """Raised when a gradient is computed again although its round is over or under way (Horovod: AssertionError)."""


@dataclasses.dataclass
class _Member(Generic[Parameter]):
    """One parameter of the set."""

    parameter: Parameter
    name: str
    passes_left: int
    touched: bool = False  # accumulated into since its last round
    handle: Handle | None = None  # invariant: set together with `loan`, exactly while its reduction is under way
    loan: Loan[Parameter] | None = None
    mark: Any = None  # identifies the reduced gradient until it is cleared or stepped with


class GradientReducer(Generic[Parameter]):
    """Reduces the gradients of one wrapped optimizer.

    Args:
        framework: gives access to gradients.
        label: makes names unique among the wrapped optimizers of this process; equal on all ranks.
        op: AVERAGE or SUM (or MIN, MAX).
        prescale: factor before the reduction.
        postscale: factor after it.
        passes: backward passes whose gradients are accumulated before each reduction.
    """

    def __init__(self, runtime: Runtime, framework: Framework[Parameter], label: str, *, op: ReduceOp, prescale: float,
                 postscale: float, passes: int) -> None:
        self._runtime = runtime
        self._framework = framework
        self._label = label
        self._op, self._prescale, self._postscale = op, prescale, postscale
        self._members: dict[int, _Member[Parameter]] = {}  # by identity: framework tensors compare elementwise
        self._rounds = 0  # since the last step
        self._passes_done = 0  # backward passes since the last round
        self._suspended = False
        self.passes = passes

    def add(self, parameter: Parameter, name: str) -> None:
        """Take a parameter into the set; the same ones in the same order on all ranks."""
        self._members[id(parameter)] = _Member(parameter, f"gradient.{self._label}.{name}", self.passes)

    def hand_over(self, parameter: Parameter) -> None:
        """A backward pass has accumulated this parameter's gradient.

        Raises:
            GradientOrderError: when it was computed more often than `passes` times before the step.
        """
        member = self._members[id(parameter)]
        if member.handle is not None or (member.mark is not None
                                         and self._framework.is_marked(parameter, member.mark)):
            raise GradientOrderError(
                f"'{member.name}' was computed more than backward_passes_per_step={self.passes} times before "
                "optimizer.step() or zero_grad(): its gradient is already reduced, and adding to it would count the other "
                "ranks twice. Raise backward_passes_per_step, use optimizer.no_sync() for all but the last backward pass, "
                "or add the losses before one backward()")
        member.mark = None
        member.touched = True
        if self._suspended:
            return
        member.passes_left -= 1
        if member.passes_left <= 0:
            self._enqueue(member)

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

    def _close_round(self) -> None:
        """Hand over or report absent whatever has not been handed over."""
        for member in self._members.values():
            if member.handle is None:
                self._enqueue(member)
        self._rounds += 1
        self._passes_done = 0

    def wait(self) -> None:
        """Wait until every gradient of the closed round is final.

        Raises:
            HorovodInternalError: when a reduction failed; all others are completed first, and the next round can start.
        """
        first_error: Exception | None = None
        for member in self._members.values():
            try:
                if member.handle is not None:
                    self._complete(member)
            except HvdliteError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def finish_if_due(self) -> None:
        """Before a step: end a round that is under way, and take part in one if there was none."""
        if self._rounds == 0 or any(member.handle is not None or (member.touched and not self._suspended)
                                    for member in self._members.values()):
            self.finish()

    def stepped(self) -> None:
        """The optimizer has used the gradients; accumulating onto them is the user's business again."""
        self._rounds = 0
        self.cleared()

    def cleared(self) -> None:
        """The gradients were cleared: what was computed so far does not count."""
        if any(member.handle is not None for member in self._members.values()):
            self.finish()
        for member in self._members.values():
            member.mark = None
            member.touched = False
            member.passes_left = self.passes
        self._passes_done = 0

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

    def _enqueue(self, member: _Member[Parameter]) -> None:
        present = member.touched and self._framework.has_gradient(member.parameter)
        loan = self._framework.lend(member.parameter) if present else self._framework.lend_empty(member.parameter)
        member.handle = self._runtime.allreduce(member.name, loan.array if present else None, loan.array, self._op,
                                                prescale=self._prescale, postscale=self._postscale)
        member.loan = loan

    def _complete(self, member: _Member[Parameter]) -> None:
        handle, loan = member.handle, member.loan
        member.handle = member.loan = None
        member.touched = False
        member.passes_left = self.passes
        assert handle is not None and loan is not None
        handle.wait()
        if handle.contributors:
            self._framework.give_back(loan)
            member.mark = self._framework.mark(member.parameter)
