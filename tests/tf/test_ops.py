"""Collectives on TensorFlow tensors, eager and inside `tf.function`, with their gradients."""

from __future__ import annotations

import pytest

from tests.tf.support import run


def test_every_collective_eager_and_in_a_graph() -> None:
    run(2, "ops:every_collective_eager_and_in_a_graph")


@pytest.mark.parametrize(("graph", "part"), [(False, "4M"), (True, "4M"), (True, "1")],
                         ids=["eager", "graph", "graph, one call for each gradient"])
def test_the_tape_equals_one_rank_with_the_whole_batch(graph: bool, part: str) -> None:
    run(2, "ops:the_tape_equals_one_rank_with_the_whole_batch", graph, HVDLITE_BUCKET_EDGE=part)
