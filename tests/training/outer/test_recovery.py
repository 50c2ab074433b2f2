"""What ranks have after `recover`, given what they have had; ranks are threads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError
from hvdlite.training.outer.fragment import NEVER
from hvdlite.training.outer.outer import Parameter
from hvdlite.training.outer.recovery import recover
from hvdlite.training.outer.settings import DiLoCo
from tests.training.outer.programs.training import Weights
from tests.worlds import threads

RANKS = ((0,), (1,), (2,))
SETTINGS = DiLoCo(4, workers="rank", fragments=2, delay=1, momentum=0.5)
PARAMETERS = [Parameter("a", 3, "float64"), Parameter("b", 3, "float64")]


@dataclasses.dataclass
class Had:
    """What a rank has had: of each fragment a value for all weights; without merges, nothing but parameters."""

    local: Sequence[float]
    merges: Sequence[int] = ()
    weights: Sequence[float] = (0.0, 0.0)
    starts: Sequence[float | None] = (None, None)
    step: int = 10

    def state(self) -> dict[str, Any]:
        if not self.merges:
            return {}
        return {"step": self.step, "delay": 1, "has_delay": True, "rank": 5, "workers": [[5]], "fragments": [
            {"weights": np.full(3, weight), "momentum": np.full(3, float(merges)), "errors": None, "is_reset": False,
             "start": None if start is None else np.full(3, start), "begun": 9, "due": 10, "merges": merges}
            for merges, weight, start in zip(self.merges, self.weights, self.starts, strict=True)]}


class Losing:
    """A runtime that fails after one collective: rank 1 does not get its result, and the others get no later one."""

    def __init__(self, runtime: Any, name: str) -> None:
        self._runtime, self._name, self._is_over = runtime, name, False

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._runtime, method)
        return found if method not in ("allreduce", "broadcast") else functools.partial(self._call, found)

    def _call(self, method: Any, name: str, *arguments: Any, **more: Any) -> Any:
        if self._is_over:
            raise HorovodInternalError("lost")
        handle, self._is_over = method(name, *arguments, **more), name == self._name
        if self._is_over and self._runtime.world.rank == 1:
            handle.wait()
            raise HorovodInternalError("lost")
        return handle


def recovered(ranks: Sequence[Had], settings: DiLoCo = SETTINGS, workers: Sequence[tuple[int, ...]] = RANKS,
              lost: str = "") -> list[tuple[list[float], dict[str, Any], bool]]:
    """Return what each rank has then: local weights, state, and whether it keeps what else it has.

    Args:
        lost: a collective of which rank 1 does not get the result; then all begin again.
    """
    def step(runtime: Any) -> tuple[list[float], dict[str, Any], bool]:
        had = ranks[runtime.world.rank]
        arrays, state = [np.full(3, each) for each in had.local], had.state()

        if lost:
            with contextlib.suppress(HorovodInternalError):
                recover(Losing(runtime, lost), "x", settings, workers, PARAMETERS, Weights(arrays), state)  # type: ignore[arg-type]
        keeps = recover(runtime, "x", settings, workers, PARAMETERS, Weights(arrays), state)
        assert all((each == each[0]).all() for each in arrays)
        return [float(each[0]) for each in arrays], state, keeps
    return threads(len(ranks), step)


def check_equal(found: Sequence[tuple[list[float], dict[str, Any], bool]], local: Sequence[float]) -> dict[str, Any]:
    """Check that all ranks have these weights, local and global, and the same state; return it."""
    for own, state, _ in found:
        assert own == pytest.approx(local, rel=1e-15) and own == [float(each["weights"][0]) for each in state["fragments"]]
        assert repr(state) == repr(found[0][1])
        assert all(each["start"] is None and each["begun"] == NEVER for each in state["fragments"])
    return found[0][1]


def test_what_workers_have_learned_is_averaged() -> None:
    """At different steps; the round that is under way is given up, and the momentum stays."""
    found = recovered([Had((13.0, 4.0), (7, 7), (10.0, 1.0), step=11), Had((10.0, 4.0), (7, 7), (10.0, 1.0), (10.0, None)),
                       Had((16.0, 4.0), (7, 7), (10.0, 1.0), (12.0, 2.0))])
    state = check_equal(found, [13.0, 4.0])
    assert state["step"] == 11 and [each["momentum"][0] for each in state["fragments"]] == [7.0, 7.0]
    assert [keeps for *_, keeps in found] == [True] * 3


@pytest.mark.parametrize(("merge", "kept"), [("carry", 3.0), (0.5, 0.5 * (15 - 20))])
def test_a_merge_that_some_have_made_is_made_by_the_others(merge: str | float, kept: float) -> None:
    """With what they have learned since it began. A rank that joins takes all weights, and is in no mean."""
    settings = dataclasses.replace(SETTINGS, merge=merge)
    found = recovered([Had((15.0, 8.0), (6, 7), (10.0, 8.0), (12.0, None)), Had((21.0, 8.0), (7, 7), (20.0, 8.0)),
                       Had((100.0, 100.0))], settings)
    state = check_equal(found, [20 + (1 + kept) / 2, 8.0])
    assert [each["momentum"][0] for each in state["fragments"]] == [7.0, 7.0] and not found[2][2]


@pytest.mark.parametrize(("merges", "start"), [(6, None), (5, 12.0)])
def test_merges_of_a_later_exchange_replace_what_they_contain(merges: int, start: float | None) -> None:
    """Of a rank that has gone back to an older commit."""
    check_equal(recovered([Had((15.0, 8.0), (merges, 7), (10.0, 8.0), (start, None), step=3),
                           Had((22.0, 8.0), (7, 7), (20.0, 8.0)), Had((22.0, 8.0), (7, 7), (20.0, 8.0))]), [20 + 4 / 3, 8.0])


def test_the_rank_with_the_most_steps_speaks_for_its_worker() -> None:
    found = recovered([Had((2.0, 2.0), (1, 1), step=9), Had((4.0, 4.0), (1, 1)), Had((8.0, 8.0), (1, 1))],
                      workers=((0, 1), (2,)))
    check_equal(found, [6.0, 6.0])
    assert [keeps for *_, keeps in found] == [False, False, True]


def test_one_worker_goes_on_with_its_weights() -> None:
    found = recovered([Had((2.0, 2.0), (1, 1), step=9), Had((4.0, 4.0), (1, 1)), Had((8.0, 8.0))], workers=())
    check_equal(found, [4.0, 4.0])
    assert not any(keeps for *_, keeps in found)


def test_weights_that_are_not_finite_are_left_out() -> None:
    check_equal(recovered([Had((np.nan, 2.0), (1, 1)), Had((4.0, 4.0), (1, 1)), Had((8.0, 6.0), (1, 1))]), [6.0, 4.0])


def test_without_any_state_nothing_is_done() -> None:
    assert recovered([Had((1.0, 2.0)), Had((3.0, 4.0))]) == [([1.0, 2.0], {}, False), ([3.0, 4.0], {}, False)]


@pytest.mark.parametrize("lost", ["x.newest.0", "x.changes.0", "x.newest.1", "x.changes.1"])
def test_a_loss_meanwhile_changes_nothing(lost: str) -> None:
    """A rank has not got a mean in which its change is, or has got one fragment only."""
    ranks = [Had((13.0, 4.0), (7, 6), (10.0, 1.0), (None, 2.0)), Had((10.0, 5.0), (6, 7), (9.0, 2.0), (8.0, None), step=11),
             Had((16.0, 6.0), (7, 7), (10.0, 2.0), (12.0, 2.0))]
    wanted = recovered(ranks)
    again = recovered(ranks, lost=lost)
    assert [local for local, *_ in again] == [local for local, *_ in wanted]
    check_equal(again, wanted[0][0])
