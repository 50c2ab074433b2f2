"""The reducer by itself: each row of its tables."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.core.errors import MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.training.gradients.arrays import Slot
from hvdlite.training.gradients.errors import GradientOrderError
from hvdlite.training.gradients.members import AGAIN, IDLE, LOCAL, READY, REDUCED, TRAILING, UNUSED, Origin
from hvdlite.training.gradients.round import WaitIn
from tests.training.reducer_set import SIZES, Set

BY_BUCKET = pytest.mark.parametrize("by_bucket", [False, True], ids=["alone", "bucket"])


# --- the table of states ------------------------------------------------------------------------------------------------


@BY_BUCKET
def test_from_the_first_accumulation_to_the_step(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket)
    own.runtime.other = lambda number, mine: np.full(SIZES[number], 3.0) if number < 2 else mine
    assert own.state(0) is IDLE
    own.accumulate(0)
    assert own.state(0) is READY and own.value(0) is None, "it has left the parameter"
    assert not own.reducer.end_pass() or own.state(1) is UNUSED
    own.reducer.wait_and_make_due(deferrable=False)
    assert [own.state(number) for number in range(3)] == [REDUCED, REDUCED, IDLE]
    assert [own.value(number) for number in range(3)] == [2.0, 1.5, None]
    own.step()
    assert {own.state(number) for number in range(5)} == {IDLE} and own.origin(0) is Origin.OLD


@BY_BUCKET
def test_passes_are_counted_until_a_round_is_due(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket, passes=2)
    own.backward(0, 1)
    assert own.state(0) is LOCAL and own.value(0) == 1.0
    with own.reducer.suspended():
        own.backward(0)
    assert own.state(0) is LOCAL and own.value(0) == 2.0, "in no_sync they do not count"
    own.accumulate(0)
    assert own.state(0) is READY
    own.accumulate(2)
    assert own.state(2) is LOCAL
    assert own.reducer.end_pass()
    assert own.state(1) is READY and own.state(2) is READY, "what is left is given when the round is closed"


@BY_BUCKET
def test_accumulated_onto_a_reduced_gradient(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket)
    own.backward(0, 1)
    with own.reducer.suspended():
        own.backward(0)
    assert own.state(0) is AGAIN and own.origin(0) is Origin.AGAIN
    own.slots[0].gradient = own.slots[0].gradient.copy()  # type: ignore[union-attr]
    assert own.origin(0) is Origin.NEW, "the script has replaced it since"
    own.backward(1)
    assert own.state(1) is REDUCED and (own.value(0), own.value(1)) == (2.0, 2.0)


def test_accumulated_onto_a_reduced_gradient_where_that_is_not_exact() -> None:
    own = Set(op=ReduceOp.SUM)
    own.backward(0)
    with pytest.raises(GradientOrderError, match="more than backward_passes_per_step=1 times"):
        own.accumulate(0)
    assert own.state(0) is REDUCED
    own.slots[1].gradient = np.ones(3, np.float32)
    own.accumulate(1)  # the first in this step
    assert own.state(1) is READY
    with pytest.raises(GradientOrderError, match="more than backward_passes_per_step=1 times"):
        own.accumulate(1)


@BY_BUCKET
def test_reduced_gradients_that_the_script_has_cleared(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket)
    own.backward(0, 1)
    own.clear()
    own.accumulate(0)
    assert own.state(1) is IDLE, "all begin anew"
    own.reducer.end_pass()
    own.reducer.wait_and_make_due(deferrable=False)
    assert (own.value(0), own.value(1)) == (1.0, None)
    own.slots[0].gradient = None
    own.backward(1)
    own.slots[1].gradient, own.slots[2].gradient = None, np.ones(5000, np.float32)
    own.accumulate(2)
    assert own.state(2) is READY


@BY_BUCKET
def test_what_comes_late_is_set_aside_and_added(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket)
    own.runtime.defers = True
    own.backward(0, 1)
    assert own.state(0) is READY and own.state(2) is UNUSED and not own.reducer.set.blocks
    own.accumulate(0, 10.0)
    own.accumulate(2, 10.0)
    assert own.state(0) is TRAILING and own.state(2) is TRAILING and own.value(0) == 10.0
    assert not own.reducer.end_pass()
    own.accumulate(0, 100.0)
    own.runtime.defers = False
    assert own.reducer.wait()
    assert own.state(0) is AGAIN and own.value(0) == 111.0
    assert own.state(2) is LOCAL and own.value(2) == 10.0
    own.step()
    assert (own.value(0), own.value(1), own.value(2)) == (111.0, 1.0, 10.0)


def test_what_comes_late_where_reducing_again_is_not_exact() -> None:
    own = Set(op=ReduceOp.SUM)
    own.runtime.defers = True
    own.runtime.other = lambda number, mine: np.ones(SIZES[number]) if number < 2 else None
    own.backward(0)
    own.accumulate(1)
    own.accumulate(2, 5.0)
    assert own.state(1) is TRAILING
    own.runtime.defers = False
    with pytest.raises(GradientOrderError, match="only after the round of an earlier"):
        own.reducer.wait()
    assert own.state(1) is REDUCED and own.value(1) == 1.0, "dropped: the other rank had one"
    assert own.state(2) is LOCAL and own.value(2) == 5.0, "added: nobody had one"


@BY_BUCKET
def test_what_is_computed_in_a_pass_that_goes_on_while_a_gradient_is_read(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket, wait_in=WaitIn.STEP)
    own.backward(0, 1)
    current = own.reducer.round
    assert current is not None and not current.is_closed
    own.slots[0].gradient = np.full(2, 10.0, np.float32)  # accumulated, and its hook is not called yet
    own.reducer.notice_trailing(current)
    assert own.state(0) is TRAILING and own.state(1) is READY
    own.reducer.finish(current)
    assert own.state(0) is AGAIN and own.value(0) == 11.0
    own.reducer.finish(current)
    assert own.reducer.round is None, "a guard ends its own round only"


@BY_BUCKET
def test_a_round_without_results(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket)
    own.slots[3].gradient = np.full(4, 7.0, np.float32)
    own.backward(0)
    assert own.state(3) is REDUCED and own.value(3) == 7.0, "the script's own counts"
    own.step()
    own.clear()
    own.runtime.error = MismatchError("refused")
    with pytest.raises(MismatchError):
        own.backward(0)
    assert own.state(0) is IDLE and own.reducer.round is None
    own.runtime.error = None
    own.clear()
    own.step()


def test_members_come_in_when_they_are_trainable() -> None:
    own = Set()
    late = Slot((3,), np.dtype(np.float32), gradient=np.ones(3, np.float32))
    own.reducer.add(late, "5")
    own.reducer.accumulated(late)
    assert own.reducer.member(late) is None and len(own.reducer.members) == 5
    late.is_expected = True
    own.accumulate(0)
    assert own.reducer.member(late) is not None
    newest = Slot((3,), np.dtype(np.float32), is_expected=True)
    own.reducer.add(newest, "6")
    own.reducer.add(newest, "6")
    assert own.reducer.member(newest) is None, "not in the middle of a round"
    own.reducer.finish()
    own.backward(0)
    assert own.reducer.member(newest) is not None and len(own.reducer.members) == 7


# --- origins ------------------------------------------------------------------------------------------------------------


@BY_BUCKET
def test_origins_of_gradients_and_what_they_are_before_the_step(by_bucket: bool) -> None:
    def rounds() -> int:
        return own.reducer.set.round_id
    own = Set(by_bucket=by_bucket)
    own.runtime.other = lambda number, mine: None if mine is None else 3 * mine
    assert own.origin(0) is Origin.NONE
    own.slots[0].gradient = np.ones(2, np.float32)
    assert own.origin(0) is Origin.OWN
    own.step()
    assert own.value(0) == 2.0 and own.origin(0) is Origin.OLD
    before = rounds()
    own.backward(1)
    assert own.value(0) == 2.0 and rounds() == before + 1, "OLD does not count"
    own.slots[1].gradient *= 2  # type: ignore[operator]
    assert own.origin(1) is Origin.REDUCED
    own.step()
    assert own.value(1) == 4.0 and rounds() == before + 1, "what is written after the reduction stays"
    own.slots[1].gradient *= 2  # type: ignore[operator]
    assert own.origin(1) is Origin.REWRITTEN
    own.backward(0)
    assert own.value(1) == 8.0, "does not count in a backward pass"
    own.step()
    assert own.value(1) == 16.0, "but in the step"
    own.slots[1].gradient *= 2  # type: ignore[operator]
    own.before_step.zeroed()
    assert own.origin(1) is Origin.OLD
    own.backward(2)
    own.slots[2].gradient = np.ones(5000, np.float32)
    assert own.origin(2) is Origin.REPLACED
    own.step()
    assert own.value(2) == 2.0


@BY_BUCKET
def test_zeros_that_the_script_writes_count_in_the_backward_pass(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket)
    own.runtime.other = lambda number, mine: mine
    own.backward(0, 1)
    own.step()
    own.slots[1].gradient *= 2  # type: ignore[operator]
    own.backward(0)  # leaves it out; a copy, where its place in the bucket is needed
    own.slots[1].gradient *= 0  # type: ignore[operator]
    assert own.origin(1) is Origin.REWRITTEN
    own.step()
    own.backward(1)
    own.step()
    own.slots[1].gradient *= 0  # type: ignore[operator]
    before = own.reducer.set.round_id
    own.backward(0)
    assert own.state(1) is REDUCED and own.value(1) == 0.0
    own.step()
    assert own.reducer.set.round_id == before + 1, "no second round in the step"


def test_a_replaced_gradient_where_reducing_again_is_not_exact() -> None:
    own = Set(op=ReduceOp.SUM)
    own.backward(0)
    own.slots[0].gradient = np.ones(2, np.float32)
    with pytest.raises(GradientOrderError, match="another gradient"):
        own.step()


@BY_BUCKET
def test_gradients_that_were_all_cleared_or_zeroed_make_a_round_due(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket)
    own.backward(0, 1)
    own.clear()
    before = own.reducer.set.round_id
    own.before_step.make_final(in_step=True)
    assert own.reducer.set.round_id == before + 1
    own.before_step.stepped()
    own.backward(0, 1)
    for number in (0, 1):
        own.slots[number].gradient *= 0  # type: ignore[operator]
    before = own.reducer.set.round_id
    own.before_step.make_final(in_step=True)
    assert own.reducer.set.round_id == before + 1 and own.value(0) == 0.0


def test_what_another_rank_could_not_change_is_an_error() -> None:
    own = Set()
    own.runtime.ranks_in_step = (1,)
    own.backward(0)
    own.slots[0].gradient *= 2  # type: ignore[operator]
    with pytest.raises(GradientOrderError, match="written to on this rank"):
        own.step()


@BY_BUCKET
def test_a_part_that_another_rank_did_not_contribute_is_an_error(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket)
    own.backward(0)
    own.runtime.other = lambda number, mine: None
    with pytest.raises(GradientOrderError, match="took part without the reduced gradient"):
        own.backward(0)


def test_gradients_that_another_optimizer_has_used() -> None:
    own, other = Set(), Set()
    other.slots = own.slots
    for number, slot in enumerate(own.slots):
        other.reducer.add(slot, f"again.{number}")
    own.backward(0, 1)
    with own.reducer.suspended():
        own.backward(1)
    assert not other.before_step.take_over(own.slots[0], own.reducer), "reduced there"
    assert other.before_step.take_over(own.slots[1], own.reducer), "and accumulated onto since"
    own.before_step.used_elsewhere(own.slots[:2])
    assert own.state(0) is IDLE and own.state(1) is LOCAL and own.reducer.is_due


# --- rounds -------------------------------------------------------------------------------------------------------------


@BY_BUCKET
def test_rounds_open_and_close(by_bucket: bool) -> None:
    own = Set(by_bucket=by_bucket, wait_in=WaitIn.STEP)
    assert own.reducer.round is None
    own.reducer.end_pass()
    current = own.reducer.round
    assert current is not None and not current.is_closed, "where nothing was given, gradients are not final either"
    own.accumulate(0)
    own.reducer.end_pass()
    assert own.reducer.round is current and own.runtime.closed == []
    own.step()
    assert current.is_closed and own.reducer.round is None and own.runtime.closed == [current.id]
    own.runtime.joins += 1
    own.backward(0)
    assert own.reducer.round is not None and own.reducer.round.id > current.id + 1, "it jumps after a join"


def test_a_failed_pass_belongs_to_the_next_one() -> None:
    own = Set()
    own.accumulate(0)
    own.reducer.fail_pass()
    current = own.reducer.round
    assert current is not None and current.of_failed_pass
    own.backward(1)
    assert current.is_closed and (own.value(0), own.value(1)) == (1.0, 1.0)


@pytest.mark.parametrize("number", [1, 2], ids=["small", "large"])
def test_a_bucket_that_breaks_sends_its_members_by_themselves(number: int) -> None:
    own = Set(by_bucket=True)
    own.backward(*range(5))
    own.clear()
    own.step()
    own.slots[number].dtype = np.dtype(np.float64)
    for each in (0, 1, 2, 3):
        if each == number:
            own.slots[each].gradient = np.full(SIZES[each], 1.0, np.float64)
            own.reducer.accumulated(own.slots[each])
        else:
            own.accumulate(each)
    own.reducer.end_pass()
    own.reducer.wait_and_make_due(deferrable=False)
    assert [own.value(each) for each in range(5)] == [1.0, 1.0, 1.0, 1.0, None] and own.runtime.stale
    own.reducer.check_invariants()


def test_small_members_are_given_together() -> None:
    own = Set(by_bucket=True)
    own.backward(*range(5))
    own.clear()
    own.step()
    for number in (0, 1, 3):
        own.slots[number].gradient = np.full(SIZES[number], 2.0, np.float32)
    assert own.reducer.accumulated_small({id(slot) for slot in own.slots[:3]}) == {id(slot) for slot in own.slots[:2]}
    assert own.state(0) is own.state(1) is READY and own.state(3) is IDLE and own.value(0) is None
    own.backward(3)
    assert [own.value(each) for each in range(5)] == [2.0, 2.0, None, 3.0, None]
