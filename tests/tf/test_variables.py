"""Whose gradient is whose: variables that have a gradient on some ranks, in some steps, or only from some step on."""

from __future__ import annotations

import pytest

from tests.tf.support import run


# docs/protocol.md#one-slot-per-variable
def test_a_tape_pairs_gradients_by_their_variables() -> None:
    run(2, "tape:a_tape_pairs_gradients_by_their_variables")


def test_keras_optimizers_with_other_variables_in_other_steps() -> None:
    run(2, "variables:keras_optimizers_with_other_variables_in_other_steps", timeout=200)


@pytest.mark.parametrize("backend", ["torch"])
def test_gradients_on_torch_wherever_they_come_from(backend: str) -> None:
    run(2, "variables:gradients_on_torch_wherever_they_come_from", KERAS_BACKEND=backend)


def test_what_a_graph_did_not_expect_is_an_error_and_joined_ranks_are_not_asked() -> None:
    run(2, "tape:what_a_graph_did_not_expect_is_an_error_and_joined_ranks_are_not_asked")
