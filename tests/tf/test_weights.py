"""Gradients averaged by what ranks count: `weight=` of tapes and Keras' optimizers."""

from __future__ import annotations

import pytest

from tests.tf.support import run


def test_tapes_and_optimizers_as_in_one_process() -> None:
    run(2, "weights:a_tape_and_an_optimizer", timeout=200)


@pytest.mark.long
def test_an_optimizer_on_jax() -> None:
    run(2, "weights:an_optimizer_without_tensorflow", KERAS_BACKEND="jax")


def test_ranks_that_forget_it_and_what_is_refused() -> None:
    run(2, "weights:ranks_that_forget_it_and_what_is_refused")


def test_one_process_checks_it_and_has_zeros_for_0() -> None:
    run(1, "weights:one_process")


def test_on_torch_it_comes_too_late() -> None:
    run(2, "weights:too_late_on_torch", KERAS_BACKEND="torch")
