"""The rows of the report of chaos."""

from __future__ import annotations

import itertools
import random

from tests.chaos.rows import Row, Trouble, rounds


def test_a_row_with_a_goal_says_how_far_it_came() -> None:
    def make(chance: random.Random, row: Row) -> None:
        row.tried += 40

    enough = rounds(Trouble("trouble", make, goal=100), 1, 1e6, itertools.count())
    assert enough.tried == 120 and enough.remark.startswith("120% of the 100 wanted, in ")
    assert rounds(Trouble("trouble", make, goal=100), 1, 0.0, itertools.count()).remark.startswith("40% of the 100 wanted")
