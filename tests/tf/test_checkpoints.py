"""`hvd.callbacks.Checkpoint`: `fit` goes on where it was, with the numbers of an undisturbed training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tf.support import only, run

pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")


@pytest.mark.parametrize("backend", only("tensorflow"))
def test_fit_goes_on_in_the_middle_of_an_epoch(backend: str, tmp_path: Path) -> None:
    def fit(folder: str, stop_after: int) -> list[list[float]]:
        return [each.result for each in run(2, "checkpoints:fit", str(tmp_path / folder), 3, stop_after, True,
                                            KERAS_BACKEND=backend)]
    whole = fit("whole", 0)
    assert [each[:3] for each in whole] == [[0.0, 1.0, 2.0]] * 2
    fit("some", 6)
    assert [each[0] for each in fit("some", 2)] == [1.0, 1.0], "four batches an epoch"
    assert [each[1:] for each in fit("some", 0)] == [each[3:] for each in whole]


@pytest.mark.parametrize("backend", only("torch"))
def test_fit_resumes_as_if_it_had_not_ended(backend: str, tmp_path: Path) -> None:
    def fit(folder: str, epochs: int, stop_after: int = 0) -> list[list[float]]:
        return [each.result for each in run(2, "checkpoints:fit", str(tmp_path / folder), epochs, stop_after,
                                            KERAS_BACKEND=backend)]
    whole = fit("whole", 3)
    assert fit("some", 2) != whole
    resumed = fit("some", 3)
    assert [each[0] for each in resumed] == [2.0, 2.0] and [each[1:] for each in resumed] == [each[3:] for each in whole]
    assert fit("some", 3) == [each[1:] for each in resumed], "nothing is left to do"
    assert [each[0] for each in fit("some", 5, stop_after=2)] == [3.0, 3.0]
    assert [each[:2] for each in fit("some", 5)] == [[3.0, 4.0]] * 2, "it was stopped in epoch 3"
