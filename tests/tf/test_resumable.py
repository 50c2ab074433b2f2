"""`hvd.resumable` for Keras: `fit` goes on at the step after which the place was saved."""

from __future__ import annotations

import pytest

from tests.tf.support import pairs, run


@pytest.mark.parametrize(("backend", "kind"), pairs(
    ("tensorflow", "arrays"), ("tensorflow", "tf.data of the epoch"), ("torch", "PyDataset with workers"),
    ("torch", "arrays")))
def test_fit_goes_on_at_the_step(backend: str, kind: str) -> None:
    run(2, "resuming:fit_goes_on_at_the_step", kind, KERAS_BACKEND=backend)


def test_a_ledger_has_everything_once() -> None:
    run(1, "resuming:a_ledger_has_everything_once")


def test_what_is_refused() -> None:
    run(1, "resuming:what_is_refused")
