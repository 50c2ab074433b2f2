"""All orders of three events; `python -m tests.membership --depth 7` goes through all orders of seven."""

from __future__ import annotations

import pytest

from hvdlite.membership.members import SUCCESSORS, World, WorldState
from tests.membership.orders import BEGINNINGS, explore


def test_all_orders_of_events_go_by_the_table_of_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/protocol.md#worlds; what is asserted stands in `tests.membership.orders` and in `World.validate`."""
    edges: set[tuple[WorldState, WorldState]] = set()
    enter = World.enter

    def entered(self: World, state: WorldState) -> None:
        edges.add((self.state, state))
        enter(self, state)
    monkeypatch.setattr(World, "enter", entered)
    for beginning in BEGINNINGS:
        assert explore(beginning, depth=3, rare=0)
    assert edges == {(state, following) for state, all in SUCCESSORS.items() for following in all}, "no cell is empty"
