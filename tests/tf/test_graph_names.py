"""Collectives without a name inside `tf.function` meet, however differently ranks have traced; other orders are told."""

from __future__ import annotations

from tests.tf.support import run


# docs/protocol.md#names
def test_ranks_that_trace_differently_pair_the_same_lines_and_are_told_where_they_wait() -> None:
    run(2, "graph_names:ranks_that_trace_differently_pair_the_same_lines_and_are_told_where_they_wait",
        HVDLITE_STALL_CHECK_TIME_SECONDS="1")
