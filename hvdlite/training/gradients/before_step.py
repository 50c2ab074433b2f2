"""What is asked before gradients are used: is a round due, and can these gradients be used?

Gradients that the script has all cleared itself begin anew as with `zero_grad`; where it has set all of them to zero, a
round is due. Gradients that no backward pass has given count by their origin (members.py). A rank that takes part from
within its step cannot have processed the gradients (clipping) as the others did: where another rank has changed them, its
step raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic

import numpy as np

from hvdlite.core.types import ReduceOp
from hvdlite.training.gradients.errors import accumulated_alone, changed_alone, replaced
from hvdlite.training.gradients.framework import Parameter
from hvdlite.training.gradients.members import AGAIN, IDLE, LOCAL, Member, Origin
from hvdlite.training.gradients.reducer import JOB_CONTINUES, Reducer
from hvdlite.training.gradients.round import LaterCall


class BeforeStep(Generic[Parameter]):
    """Makes gradients final before they are used, and keeps account of their use.

    Args:
        looks_for_replaced: whether gradients are reduced with which a script has replaced reduced ones, also outside of the
            step. Where reducing them again is not exact, that raises.
    """

    def __init__(self, reducer: Reducer[Parameter], *, looks_for_replaced: bool = True) -> None:
        self.reducer = reducer
        self._looks_for_replaced = looks_for_replaced

    def make_final(self, *, in_step: bool = False) -> None:
        """End a round that is under way, and take part in one if there was none since the last step.

        Args:
            in_step: whether the step that uses the gradients follows without the script being able to change them.

        Raises:
            GradientOrderError: when this rank changed gradients in between, and other ranks could not.
            HorovodInternalError: Like `Reducer.finish`.
        """
        reducer = self.reducer
        reducer.admit()
        if not reducer.members:
            return
        with reducer.lock:  # another thread that reads a gradient meanwhile finds the round over
            reducer.set.in_step = in_step
            try:
                self._make_final(reducer, in_step)
            finally:
                reducer.set.in_step = reducer.written_too = False

    def _make_final(self, reducer: Reducer[Parameter], in_step: bool) -> None:
        if reducer.is_due or reducer.round is not None or self._were_cleared_or_zeroed():
            try:
                reducer.make_round()
            except JOB_CONTINUES:
                if reducer.round is None:
                    with suppress(*JOB_CONTINUES):
                        self._finish_rest()
                raise
        if in_step and reducer.ranks_in_step:
            self._check_unchanged()
        self._finish_rest()
        if not reducer.passes.is_suspended and (in_step or self._looks_for_replaced) and self._has_unreduced():
            reducer.written_too = True
            reducer.make_round()

    def cleared(self) -> None:
        """The gradients were cleared: what was computed so far does not count, so a round is due before the next step."""
        self.reducer.finish()
        self.reducer.ranks_in_step.clear()
        self.reducer.forget()

    def zeroed(self) -> None:
        """After `cleared`: the gradients were set to zero, in place, which does not make them the script's own."""
        self.reducer.members.renew()

    def stepped(self) -> None:
        """The optimizer has used the gradients; accumulating onto them is the user's business again."""
        self.reducer.set.step += 1
        self.reducer.runtime.progress.round()
        self.cleared()

    @contextmanager
    def later_call(self) -> Iterator[None]:
        """Return a context for a call of a step's closure after the first one, which computes gradients anew or accumulates.

        They are final at its end (`make_final`). All ranks have one, and compare there what they did.

        Raises:
            GradientOrderError: on all ranks, when some accumulated onto gradients that others left out.
        """
        reducer = self.reducer
        self._expect_round()
        reducer.later_call = LaterCall() if reducer.is_idempotent else None
        try:
            yield
        finally:
            call, reducer.later_call = reducer.later_call, None  # rounds that follow raise their own errors
        if call is None:
            return
        flags = np.array([call.accumulates, call.leaves_out], np.uint8)
        reducer.runtime.allreduce(f"{reducer.set.label}.closure", flags, flags, ReduceOp.MAX,
                                  process_set=reducer.set.process_set_id).wait()
        if flags.all():
            raise accumulated_alone(reducer.rank, call.accumulates)
        if call.incomplete is not None:
            raise call.incomplete

    def used_elsewhere(self, parameters: Iterable[Parameter]) -> None:
        """Another reducer's step has used these gradients, or they were cleared there: later ones are reduced anew."""
        members = [member for parameter in parameters if (member := self.reducer.member(parameter)) is not None]
        self.reducer.members.forget_reduced(members)
        if members:
            self._expect_round()

    def take_over(self, parameter: Parameter, other: Reducer[Parameter]) -> bool:
        """Return whether a gradient that another reducer has not reduced is to be reduced here."""
        own, theirs = self.reducer.member(parameter), other.member(parameter)
        if theirs is None:
            return True
        origin = other.members.origin(theirs, other.framework.get(parameter))
        if origin in (Origin.REDUCED, Origin.OLD) or (origin is Origin.REWRITTEN and not other.is_idempotent):
            return False
        if own is not None and own.state is IDLE and theirs.state in (LOCAL, AGAIN):
            own.state, own.passes = LOCAL, 0
            self.reducer.has_local = True
        return True

    def unseen(self) -> list[Member[Parameter]]:
        """Return the members whose gradients the script has set, and that are reduced with the next round."""
        members = self.reducer.members
        if self.reducer.passes.is_suspended:
            return []
        return [member for member in members if member.state is IDLE
                and members.needs_round(members.origin(member, members.gradient(member)))]

    def _expect_round(self) -> None:
        """A round is due before gradients are used, whatever this rank computes."""
        if self.reducer.round is None:
            self.reducer.is_due = True

    def _finish_rest(self) -> None:
        """Reduce what was computed since the last round, which is less than a round's passes."""
        reducer = self.reducer
        if not reducer.passes.is_suspended and (reducer.has_local or reducer.passes.pending):
            reducer.make_round()

    def _were_cleared_or_zeroed(self) -> bool:
        """Return whether the script has cleared the gradients of a step that it skipped, and computed none since."""
        reducer = self.reducer
        if not reducer.has_reduced:
            return False
        if reducer.members.were_cleared():
            return True
        return not reducer.has_local and not reducer.ranks_in_step and reducer.members.were_zeroed()

    def _has_unreduced(self) -> bool:
        """Return whether a gradient is about to be used that no backward pass has given."""
        members = self.reducer.members
        for member in members.unlike_reduced():
            origin = members.origin(member, members.gradient(member))
            if members.needs_round(origin):
                return True
            if origin is Origin.REPLACED and self._looks_for_replaced:
                if not members.is_idempotent:
                    raise replaced(member.name, self.reducer.rank, self.reducer.set.reduction)
                return True
        return False

    def _check_unchanged(self) -> None:
        members = self.reducer.members
        for member in members.reduced():
            if members.is_written(member):
                raise changed_alone(member.name, self.reducer.ranks_in_step)
