"""A gradient set: the gradients of one wrapped optimizer, which are reduced together in one round after the other."""

from __future__ import annotations

import dataclasses
from typing import Generic

from hvdlite.core.types import ReduceOp
from hvdlite.negotiation.layouts import first_round
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.framework import Framework, Parameter
from hvdlite.training.gradients.weights import RankWeights


@dataclasses.dataclass(slots=True)
class GradientSet(Generic[Parameter]):
    """How the gradients of one wrapped optimizer are reduced, and how far it has come."""

    runtime: Runtime
    framework: Framework[Parameter]
    label: str  # makes names unique among the wrapped optimizers of this process; equal on all ranks
    op: ReduceOp
    prescale: float
    postscale: float
    process_set_id: int  # of the ranks that take part
    sharded: bool = False  # the optimizer's state is divided among them
    joins: int = dataclasses.field(init=False)  # changes when all ranks have joined
    round_id: int = dataclasses.field(init=False)  # of the last round that began; it jumps then: some had fewer rounds
    step: int = 0  # how many steps the optimizer has made since then
    in_step: bool = False  # the optimizer's step takes part in a round now
    blocks: bool = False  # whoever ends a round waits for its results at once
    weights: RankWeights = dataclasses.field(init=False)
    has_new_sparse: bool = False  # a member turned out to be sparse: the layout does not describe it any more

    def __post_init__(self) -> None:
        self.joins = self.runtime.joins
        self.round_id = first_round(self.joins) - 1
        self.weights = RankWeights(self.runtime, len(self.runtime.members(self.process_set_id)), self.label)

    def begin_round(self) -> None:
        """Another round begins."""
        if self.joins != self.runtime.joins:
            self.joins, self.step = self.runtime.joins, 0
            self.round_id = first_round(self.joins) - 1
        self.round_id += 1

    def weigh(self) -> None:
        """Weight averages from now on: they are sums, divided by the number of ranks, and then by the weights."""
        self.weights.are_used = True
        if self.op is ReduceOp.AVERAGE:
            self.op, self.postscale = ReduceOp.SUM, self.postscale / self.weights.ranks

    @property
    def reduction(self) -> str:
        """How the reduction is named in messages; an average that is not exact is a communication hook's."""
        if self.weights.are_used:
            return "weights"
        return f"op={self.op.name.capitalize()}" if self.op is not ReduceOp.AVERAGE else "this communication hook"

    @property
    def moment(self) -> Moment:
        """Where this rank is now."""
        return Moment(self.label, self.round_id, self.step, self.in_step, self.sharded)
