"""All orders of three events; `python -m tests.membership --depth 7` goes through all orders of seven."""

from __future__ import annotations

import pytest

from hvdlite.membership.members import SUCCESSORS, JobWorld, WorldState
from tests.membership.orders import BEGINNINGS, explore


def test_all_orders_of_events_go_by_the_table_of_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/protocol.md#worlds; what is asserted stands in `tests.membership.orders` and in `tests.membership.invariants`."""
    edges: set[tuple[WorldState, WorldState]] = set()
    enter = JobWorld.enter

    def entered(self: JobWorld, state: WorldState) -> None:
        edges.add((self.state, state))
        enter(self, state)
    monkeypatch.setattr(JobWorld, "enter", entered)
    for beginning in BEGINNINGS:
        assert explore(beginning, depth=3, rare=0)
    assert edges == {(state, following) for state, all in SUCCESSORS.items() for following in all}, "no cell is empty"
