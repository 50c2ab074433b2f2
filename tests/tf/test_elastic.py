"""States and callbacks of elastic training on two ranks, without a launcher that is elastic."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run


@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_goes_on_where_it_was(backend: str) -> None:
    run(2, "elastic:fit_goes_on_where_it_was", backend == "tensorflow", KERAS_BACKEND=backend)


def test_states_and_their_errors() -> None:
    run(2, "elastic:states_and_their_errors")


def test_a_position_is_divided_among_the_ranks() -> None:
    run(2, "elastic:a_position_is_divided_among_the_ranks")


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_differs_on_some_rank_is_sent(backend: str) -> None:
    run(2, "elastic:only_what_differs_is_sent", KERAS_BACKEND=backend)


def test_a_loss_in_the_middle_of_sync_leaves_a_whole_state() -> None:
    run(2, "elastic:a_loss_in_the_middle_of_sync_leaves_a_whole_state")
