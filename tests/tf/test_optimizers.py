"""What people do with an optimizer beside `fit`: wrap it late, scale the loss, accumulate, save, compile again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tf.support import BACKENDS, run


@pytest.mark.parametrize("backend", BACKENDS)
def test_optimizers_that_scale_accumulate_and_are_wrapped_saved_and_used_late(backend: str, tmp_path: Path) -> None:
    run(2, "optimizers:optimizers_that_scale_accumulate_and_are_wrapped_saved_and_used_late", str(tmp_path),
        KERAS_BACKEND=backend)


def test_warm_up_with_several_batches_in_one_call_reaches_the_rate() -> None:
    run(2, "optimizers:warm_up_with_several_batches_in_one_call_reaches_the_rate")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_broadcast_is_told_and_one_after_the_first_batch_is_in_time(backend: str) -> None:
    run(2, "optimizers:a_missing_broadcast_is_told_and_one_after_the_first_batch_is_in_time", KERAS_BACKEND=backend)
