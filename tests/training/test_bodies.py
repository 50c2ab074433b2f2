"""States of loops that count bodies, without a job; see docs/protocol.md#bodies."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from hvdlite import api, boundaries
from hvdlite.core.errors import HostsUpdatedInterrupt
from hvdlite.membership.messages import StateReport, WorldOrder
from hvdlite.training.elastic.state import ObjectState, State


@pytest.fixture(autouse=True)
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "is_elastic", lambda: True)


def stopped(state: State, **fields: bool) -> StateReport:
    return state._stopped(StateReport(**fields))


def order(commits: int, boundaries: int, *, restore: bool = False) -> WorldOrder:
    return WorldOrder(epoch=2, members=(0,), ranks_by_machine=((0,),), host_names=("a",), restore=restore, commits=commits,
                      boundaries=boundaries)


class Gradients(ObjectState):
    """A state whose gradients may pass from a body to the next one, as those of torch."""

    _keeps_gradients = True


def test_a_body_is_run_again_with_the_attributes_and_random_numbers_of_its_boundary() -> None:
    state: Any = ObjectState(step=0, seen=[])
    for number in range(3):
        state._begin_body()
        state.seen.append(number)
        state.step += 1
    state._begin_body()
    drawn = random.random(), np.random.random()
    state.seen.append("half")
    state.step = 70
    report = stopped(state)
    assert (report.commits, report.boundaries, report.can_resume) == (0, 3, True)
    for _ in range(2):  # the copy stays as it is
        state._go_back(order(0, 3))
        assert (state.step, state.seen) == (3, [0, 1, 2]) and (random.random(), np.random.random()) == drawn
        state.seen.append("again")
    state._begin_body()
    assert stopped(state).boundaries == 3, "the same body has the same number"


def test_a_member_at_another_boundary_goes_back_to_none_of_its_own() -> None:
    state: Any = ObjectState(step=0)
    for _ in range(2):
        state._begin_body()
        state.step += 1
    state._go_back(order(0, 2))
    assert state.step == 2
    state._take_position((0, 2))
    assert not stopped(state).can_resume, "its copy is of the boundary before"
    state._synchronized()
    assert stopped(state).can_resume


def test_a_step_ends_what_can_be_run_again_and_who_stands_there_still_takes_its_small_things() -> None:
    state: Any = Gradients(step=0)
    state._begin_body()
    state.step = 1
    api.worlds().step_begins()
    assert not stopped(state).can_resume
    state._go_back(order(0, 0))
    assert state.step == 0
    assert not stopped(state).can_resume, "the parameters come from another member"


def test_a_body_without_a_step_has_no_boundary_after_it() -> None:
    state: Any = Gradients(step=0)
    for steps in (True, False, False):
        state._begin_body()
        if steps:
            api.worlds().step_begins()
        state.step += 1
    state._begin_body()
    report = stopped(state)
    assert report.boundaries == 1 and report.can_resume
    state._go_back(order(0, 1))
    assert state.step == 1


def test_a_commit_in_a_body_is_made_at_the_next_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = ObjectState(step=0)
    passed: list[int] = []
    monkeypatch.setattr(boundaries, "boundary", lambda: passed.append(state.step))
    state._begin_body()
    state.commit()
    state.check_host_updates()
    assert state._commits == 0 and passed == [0]
    state.step = 1
    state._begin_body()
    assert (state._commits, state._body, passed) == (1, 0, [0, 1])
    state.step = 2
    state._end_bodies()
    assert (state._commits, state._body, passed) == (1, 1, [0, 1, 2])
    state.commit()
    assert (state._commits, state._body, passed) == (2, None, [0, 1, 2, 2]), "a boundary outside of the loop"
    state.step = 7
    assert not stopped(state).can_resume
    state._go_back(order(2, 0, restore=True))
    assert state.step == 2


def test_a_commit_that_was_due_in_a_lost_body_is_not_made() -> None:
    state: Any = ObjectState(step=0)
    state._begin_body()
    state.commit()
    report = stopped(state)
    assert report.can_resume
    state._go_back(order(0, 0))
    state._begin_body()
    assert state._commits == 0


def test_who_stops_at_a_boundary_has_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = ObjectState(step=0)
    state._begin_body()
    state.step = 1

    def interrupt() -> None:
        raise HostsUpdatedInterrupt
    monkeypatch.setattr(boundaries, "boundary", interrupt)
    with pytest.raises(HostsUpdatedInterrupt):
        state._begin_body()
    report = stopped(state, at_rest=True)
    assert (report.boundaries, report.can_resume) == (1, True)
    assert not stopped(state, at_rest=True, is_behind=True).can_resume


def test_restore_goes_back_to_the_number_of_the_last_synchronisation() -> None:
    state: Any = ObjectState(step=4)
    state._take_position((2, 9))
    state._synchronized()
    for _ in range(2):
        state._begin_body()
    assert state._position() == (2, 10)
    state._go_back(order(2, 10, restore=True))
    assert state._position() == (2, 9) and not stopped(state).can_resume


def test_loops_that_count_no_bodies_report_as_before() -> None:
    state: Any = ObjectState(step=0)
    state.commit()
    for _ in range(3):
        state.check_host_updates()
    state._synchronized()
    report = stopped(state, at_rest=True)
    assert (report.commits, report.boundaries, report.can_resume, report.at_rest) == (1, 4, False, True)
    assert stopped(state).boundaries == 0, "those are counted in one world"


def test_a_state_that_makes_no_small_copy_cannot_resume_and_copies_cost_nothing_without_a_job(
        monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(State):
        """A state of a script."""

        def save(self) -> None:
            """Nothing."""

    own = Own()
    own._begin_body()
    own._begin_body()
    assert stopped(own).boundaries == 1 and not stopped(own).can_resume
    monkeypatch.setattr(api, "is_elastic", lambda: False)
    state = ObjectState(step=0)
    state._begin_body()
    assert state._small is None


def test_another_training_counts_anew() -> None:
    state: Any = ObjectState(step=0)
    state._begin_body()
    state._begin_body()
    state._forget_bodies()
    assert state._position() == (0, None) and not stopped(state).can_resume
