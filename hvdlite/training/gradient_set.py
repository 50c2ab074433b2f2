"""A gradient set: what the rounds of one wrapped optimizer have in common."""

from __future__ import annotations

from typing import Generic

from hvdlite.core.types import ReduceOp
from hvdlite.negotiation.layouts import first_round
from hvdlite.negotiation.messages import Layout
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.framework import Framework, Parameter
from hvdlite.training.member_gradients import MemberGradients
from hvdlite.training.members import Members


class GradientSet(Generic[Parameter]):
    """The parameters of one wrapped optimizer, how their gradients are reduced, and how many rounds there were.

    Args:
        label: makes names unique among the wrapped optimizers of this process; equal on all ranks.
        process_set_id: of the ranks that take part.

    Attributes:
        members: the parameters that take part.
        gradients: which of their gradients are reduced.
        round_id: of the last round that began. Ranks that joined early have had fewer rounds, so it jumps when all have
            joined.
        step: how many steps the optimizer has made, since all ranks have last joined.
        in_step: whether the optimizer's step takes part in a round now.
    """

    def __init__(self, runtime: Runtime, framework: Framework[Parameter], label: str, *, op: ReduceOp, prescale: float,
                 postscale: float, process_set_id: int) -> None:
        self.runtime, self.framework, self.label, self.process_set_id = runtime, framework, label, process_set_id
        self.op, self.prescale, self.postscale = op, prescale, postscale
        self.members: Members[Parameter] = Members(f"gradient.{label}.")
        self.gradients = MemberGradients(framework)
        self.step = 0
        self.in_step = False
        self.joins = runtime.joins
        self.round_id = first_round(self.joins) - 1

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return self.runtime.world.rank

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.runtime.members(self.process_set_id))

    def has_factors_of(self, layout: Layout) -> bool:
        """Return whether a layout's buckets are reduced as this set is; one of an earlier world may not be."""
        return all((bucket.response.op, bucket.response.prescale, bucket.response.postscale)
                   == (self.op, self.prescale, self.postscale) for bucket in layout.buckets)

    def next_round(self) -> int:
        """Begin a round; return its id."""
        if self.joins != self.runtime.joins:
            self.joins = self.runtime.joins
            self.round_id = first_round(self.joins) - 1
            self.step = 0
        self.round_id += 1
        return self.round_id

    def moment(self) -> Moment:
        """Return where this rank is now."""
        return Moment(self.label, self.round_id, self.step, self.in_step)
