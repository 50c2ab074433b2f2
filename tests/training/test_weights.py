"""The arithmetic of weights: a rank's rows, the factor of a round, and who had none."""

from __future__ import annotations

import logging
import math
import operator
import random
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.training.gradients.arrays import Rows, scaled
from hvdlite.training.gradients.errors import GradientOrderError
from hvdlite.training.gradients.weights import RankWeights, check_weight
from tests.training.fake_runtime import FakeRuntime
from tests.training.reducer_set import Set


def counting(ranks: int, is_optional: bool = False) -> list[RankWeights]:
    made = []
    for rank in range(ranks):
        runtime: Any = FakeRuntime()
        runtime.world.rank = rank
        made.append(RankWeights(runtime, ranks, "set"))
        made[-1].are_used, made[-1].is_optional = True, is_optional
    return made


def reduced(all_weights: list[RankWeights], counts: list[list[float | None]], gradients: Any) -> list[float]:
    """Return each rank's result of a round: rank r's pass p has `gradients[r][p]`, and counted `counts[r][p]`."""
    total = 0.0
    for weights, counted, own in zip(all_weights, counts, gradients, strict=True):
        for count, gradient in zip(counted, own, strict=True):
            total += gradient if count is None else gradient * count / weights.unit
            weights.add(count)
    rows = np.concatenate([weights.take_rows() for weights in all_weights])
    return [total / len(all_weights) * weights.factor(rows) for weights in all_weights]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("passes", [1, 3])
def test_results_are_weighted_averages(ranks: int, passes: int) -> None:
    rng, made = random.Random(ranks * passes), counting(ranks)
    for _ in range(20):
        counts: Any = [[rng.choice([0, 1, 7, 1000, 0.25, 1e6]) for _ in range(passes)] for _ in range(ranks)]
        gradients = [[rng.uniform(-1, 1) for _ in range(passes)] for _ in range(ranks)]
        total = sum(map(sum, counts))
        expected = passes * sum(sum(map(operator.mul, *pair)) for pair in zip(counts, gradients, strict=True)) / (total or 1)
        for result in reduced(made, counts, gradients):
            assert result == pytest.approx(expected, rel=1e-13, abs=1e-13)


def test_equal_weights_multiply_nothing_from_the_second_round_on() -> None:
    made = counting(3)
    for number in range(3):
        if number:
            assert all(weights.unit == 23 for weights in made)
        for weights in made:
            weights.add(23)
            weights.add(23)
        rows = np.concatenate([weights.take_rows() for weights in made])
        factors = {weights.factor(rows) for weights in made}
        assert factors == ({1024 / 23} if not number else {1.0})


def test_a_rank_without_a_pass_sends_no_row_and_passes_count_once() -> None:
    one, other = counting(2)
    one.add(3)
    assert other.take_rows().shape == (0, 3)
    assert one.take_rows().tolist() == [[0, 3, 1]] and one.take_rows().shape == (0, 3)
    one.add(3)
    one.clear()
    assert one.take_rows().shape == (0, 3)
    assert one.factor(np.empty((0, 3))) == 1.0 and not one.is_zero
    one.are_used = False
    one.add(None)
    one.are_used = True
    assert one.take_rows().shape == (0, 3), "passes before the first weight do not count"


def test_all_ranks_name_those_that_had_no_weight() -> None:
    one, other, _ = counting(3)
    rows = np.array([[0, 3.0, 1], [1, math.nan, 2]])
    with pytest.raises(MismatchError, match=r"'set': rank 1 made a backward pass without one; rank 0 had .*set_weight"):
        one.factor(rows)
    with pytest.raises(MismatchError, match=r"rank 1 made a backward pass without one \(rank 1 is this rank\)"):
        other.factor(rows)
    rows[0, 1] = math.nan
    with pytest.raises(MismatchError, match=r"ranks 0, 1 made .*; there were weights before"):
        one.factor(rows)
    [optional] = counting(1, is_optional=True)
    assert optional.factor(rows) == 1.0, "a plain average"
    rows[0, 1] = 3.0
    with pytest.raises(MismatchError, match="rank 1 made a backward pass without one"):
        optional.factor(rows)


def test_weights_that_are_all_zero(caplog: pytest.LogCaptureFixture) -> None:
    made = counting(2)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        for _ in range(3):
            assert reduced(made, [[0], [0]], [[1.0], [2.0]]) == [0.0, 0.0]
            assert made[0].is_zero
            made[0].clear()
            assert made[0].is_zero, "until another round"
    assert [record.getMessage() for record in caplog.records] == [
        "'set': the weights of all ranks are 0, so no rank makes this step"]
    reduced(made, [[0], [4]], [[1.0], [2.0]])
    reduced(made, [[0], [0]], [[1.0], [2.0]])
    assert not made[0].is_zero, "two rounds of a step, one of which counts"


def test_the_unit_is_found_anew_when_all_ranks_have_joined() -> None:
    one, other = made = counting(2)
    reduced(made, [[8], [8]], [[1.0], [1.0]])
    assert one.unit == other.unit == 8 and one.has_unit
    for weights in made:
        weights._runtime.joins += 1
    assert one.unit == other.unit == 8 and not one.has_unit, "a round under way keeps it"
    assert [weights.renew() for weights in made] == [8 / 1024] * 2 and one.unit == other.unit == 1024
    assert one.renew() == 1.0 and not one.has_unit
    reduced(made, [[8], [8]], [[1.0], [1.0]])
    assert one.unit == other.unit == 8 and one.has_unit


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "many", None, [1, 2]])
def test_what_is_no_weight(weight: object) -> None:
    with pytest.raises(ValueError, match="rank 3: the weight of this rank's gradients must be a finite number") as error:
        check_weight(weight, 3)
    assert repr(weight) in str(error.value)


def test_gradients_of_weight_zero_are_zeros_whatever_they_are() -> None:
    gradient = np.array([np.nan, np.inf, 1.0], np.float32)
    assert scaled(gradient, 0.0).tolist() == [0, 0, 0]  # type: ignore[union-attr]
    assert scaled(gradient, 1.0) is gradient
    rows = scaled(Rows(np.array([4]), np.array([[2.0, np.nan]])), 0.5)
    assert isinstance(rows, Rows) and rows.indices.tolist() == [4] and rows.values[0, 0] == 1.0


# --- the reducer ----------------------------------------------------------------------------------------------------------


def weighed(own: Set, weight: float | None, *numbers: int) -> None:
    weights = own.reducer.weigh()
    own.reducer.set.weights.add(weight)
    own.backward(*numbers, value=1.0 if weight is None else weight / weights.unit)


@pytest.mark.parametrize("by_bucket", [False, True], ids=["alone", "bucket"])
def test_a_weighted_round(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket)
    own.runtime.other_rows = np.array([[1, 6.0, 1]])
    unit = own.reducer.weigh().unit
    own.runtime.other = lambda number, mine: np.full_like(mine, 4 * 6 / unit) if number == 0 else None
    weighed(own, 2.0, 0, 1)
    assert own.value(0) == pytest.approx((2 + 24) / 8) and own.value(1) == pytest.approx(2 / 8)
    assert (own.reducer.set.op, own.reducer.set.postscale) == (ReduceOp.SUM, 0.5)
    assert own.runtime.closed == [1]
    own.step()
    assert own.reducer.set.weights.unit == 4


def test_results_of_a_round_that_a_rank_has_not_counted_are_dropped() -> None:
    own = Set()
    own.runtime.other_rows = np.array([[1, math.nan, 1]])
    with pytest.raises(MismatchError, match="rank 1 made a backward pass without one"):
        weighed(own, 2.0, 0, 1)
    assert own.value(0) is None and own.value(1) is None
    own.reducer.check_invariants()
    own.step()
    own.runtime.other_rows = np.array([[1, 2.0, 1]])
    weighed(own, 2.0, 0)
    assert own.value(0) is not None


def test_a_second_pass_onto_weighted_gradients() -> None:
    own = Set()
    weighed(own, 2.0, 0)
    with pytest.raises(GradientOrderError, match="with weights reducing it again would count"):
        own.accumulate(0)


def test_a_first_weight_in_the_middle_of_a_step() -> None:
    own = Set(passes=2)
    own.backward(0)
    with pytest.raises(GradientOrderError, match="rank 0: 'set' has accumulated gradients since the last step without"):
        own.reducer.weigh()
    own.before_step.cleared()
    own.reducer.weigh()
