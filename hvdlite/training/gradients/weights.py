"""Averages of gradients that are weighted by what the ranks counted: samples, or tokens (docs/protocol.md#weights).

Rank r's gradient g_rp of backward pass p is a mean over n_rp. A round of k passes on R ranks gives

    k sum_rp n_rp g_rp / sum_rp n_rp,

which for equal weights is the average over ranks. Each rank multiplies g_rp by n_rp / u before the reduction, a sum over
ranks divided by R, and each result is multiplied by k u R / sum_rp n_rp. The unit u is equal on all ranks: the mean weight
of their first round, so that 16-bit gradients stay in their range. Both factors are 1, and skipped, where all weights are u.

What the ranks counted travels with the gradients of a round, as a row of each rank that made a pass: its number, the sum of
its weights, and the number of its passes. So no rank waits for anything else, and all ranks find out who had no weight. A
rank that never had one averages, which does not agree with the sums of the others (negotiation/agreement.py).
"""

from __future__ import annotations

import logging
import math

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError
from hvdlite.negotiation.agreement import named_ranks
from hvdlite.runtime.runtime import Runtime

_log = logging.getLogger("hvdlite")
_FIRST_UNIT = 1024.0
"""Between usual numbers of samples and of tokens; a power of two, so that dividing by it rounds nothing."""


def check_weight(weight: object, rank: int) -> float:
    """Return a weight as a number.

    Raises:
        ValueError: unless it is a finite number, at least 0.
    """
    try:
        value = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"rank {rank}: the weight of this rank's gradients must be a finite number, at least 0 (how many "
                         f"samples or tokens their mean is over), not {weight!r}")
    return value


class RankWeights:
    """What this rank has counted since the last round, and what the rounds' results are multiplied by.

    Args:
        ranks: how many share the gradients.
        label: of the gradient set, for messages.

    Attributes:
        are_used: whether averages are weighted.
        is_optional: whether a round in which no rank has a weight is a plain average, and not an error.
        is_zero: whether all weights were 0 in all rounds of the last step.
        share: of this rank in the last round's weights, times the number of ranks.
        unit: the weight of gradients that are not multiplied by anything.
    """

    def __init__(self, runtime: Runtime, ranks: int, label: str) -> None:
        self.are_used = self.is_optional = self.is_zero = False
        self.ranks = ranks
        self.share = 1.0
        self._runtime, self._label = runtime, label
        self.unit = _FIRST_UNIT
        self._is_first = True  # the unit becomes the mean of the next round
        self._joins = runtime.joins  # when that began; ranks that had joined did not see the round
        self._sum, self._passes, self._begins_step, self._has_warned = 0.0, 0, True, False

    @property
    def has_unit(self) -> bool:
        """Whether the unit stays as it is."""
        return not self._is_first and self._joins == self._runtime.joins

    def renew(self) -> float:
        """Before a round begins: find the unit anew if all ranks have joined since.

        Returns:
            By what gradients are to be multiplied that have accumulated.
        """
        if self._joins == self._runtime.joins:
            return 1.0
        before, self.unit = self.unit, _FIRST_UNIT
        self._is_first, self._joins = True, self._runtime.joins
        return before / self.unit

    def add(self, weight: float | None) -> None:
        """Count a backward pass, if averages are weighted; None is one without a weight."""
        if self.are_used:
            self._sum += math.nan if weight is None else weight
            self._passes += 1

    def take_rows(self) -> Array:
        """Return what was counted for the round that is closed, (1, 3) float64, without a pass (0, 3); begin anew."""
        rows = np.array([[self._runtime.world.rank, self._sum, self._passes]])[:1 if self._passes else 0]
        self._sum, self._passes = 0.0, 0
        return rows

    def clear(self) -> None:
        """What was counted so far does not count, and other rounds follow."""
        self._sum, self._passes, self._begins_step = 0.0, 0, True

    def factor(self, rows: Array) -> float:
        """Return the factor for a round's results, given the rows of all ranks.

        Raises:
            MismatchError: when a rank made a pass without a weight.
        """
        ranks, weights, passes = rows[:, 0].astype(int).tolist(), rows[:, 1], rows[:, 2]
        forgot = sorted(rank for rank, weight in zip(ranks, weights, strict=True) if math.isnan(weight))
        if forgot and not (self.is_optional and len(forgot) == len(rows)):
            rank, others = self._runtime.world.rank, sorted(set(ranks).difference(forgot))
            raise MismatchError(
                f"ranks disagree about the weights of '{self._label}': {named_ranks(forgot)} made a backward pass without "
                f"one{f' (rank {rank} is this rank)' if rank in forgot else ''}; "
                f"{f'{named_ranks(others)} had weights' if others else 'there were weights before'}. A weight is for one "
                "pass: call set_weight(n) before every backward() on all ranks, of every optimizer whose parameters it "
                "reaches, with 0 where there is nothing to count; in TensorFlow and Keras, pass weight=n in every step. "
                "The gradients of this round are dropped")
        total = float(weights.sum())  # NaN where all ranks had none
        self.is_zero = total == 0 and (len(rows) > 0 if self._begins_step else self.is_zero)
        self._begins_step = False
        if forgot or not len(rows):
            return 1.0
        if not total:
            if not self._has_warned and self._runtime.world.rank == min(ranks):
                _log.warning("'%s': the weights of all ranks are 0, so no rank makes this step", self._label)
            self._has_warned = True
            return 1.0
        self.share = float(weights[ranks.index(self._runtime.world.rank)]) * self.ranks / total if (
            self._runtime.world.rank in ranks) else 0.0
        factor = float(passes.max()) * self.unit * self.ranks / total
        if self._is_first:
            self.unit, self._is_first = total / float(passes.sum()), False
        return factor
