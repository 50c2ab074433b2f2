"""The rows of the report of chaos."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.chaos.rows import Row, Trouble, reason_in, rounds


def test_a_row_with_a_goal_says_how_far_it_came() -> None:
    def make(chance: random.Random, row: Row) -> None:
        row.tried += 40

    enough = rounds(Trouble("trouble", make, goal=100), 1, 1e6, itertools.count())
    assert enough.tried == 120 and enough.remark.startswith("120% of the 100 wanted, in ")
    assert rounds(Trouble("trouble", make, goal=100), 1, 0.0, itertools.count()).remark.startswith("40% of the 100 wanted")


def test_a_traceback_of_hvdrun_is_no_reason() -> None:
    trace = 'Traceback (most recent call last):\n  File "{}", line 1, in start\nRuntimeError: can\'t start new thread\n'
    assert reason_in(trace.format("/x/train.py")).startswith("RuntimeError: ")
    assert reason_in("[0]<stderr>: killed\nhvdrun: rank 0 failed\n") == "hvdrun: rank 0 failed"
    for file in ("/x/site-packages/hvdlite_runner/job.py", "/x/runner/job.py"):
        with pytest.raises(AssertionError, match="hvdrun ended in a traceback"):
            reason_in(trace.format(file) + "hvdrun: rank 0 failed\n")
    with pytest.raises(AssertionError, match="no reason"):
        reason_in("")
