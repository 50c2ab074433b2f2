"""`model.fit` on two ranks equals one process with the global batch; saving, loss scaling, callbacks, other backends."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.tf.support import run


def test_fit_equals_one_process_with_the_global_batch() -> None:
    run(2, "fit:fit_equals_one_process_with_the_global_batch")


def test_fit_with_every_option_equals_one_process_or_is_refused() -> None:
    run(2, "fit:fit_with_every_option_equals_one_process_or_is_refused")


def test_sparse_embeddings_and_local_layers() -> None:
    run(2, "fit:sparse_embeddings_and_local_layers")


def test_an_overflow_on_a_process_set_is_its_members_business() -> None:
    run(3, "fit:an_overflow_on_a_process_set_is_its_members_business")


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_mixed_precision_and_optimizers_of_the_users_own(backend: str, tmp_path: Path) -> None:
    run(2, "fit:mixed_precision_and_optimizers_of_the_users_own", str(tmp_path), KERAS_BACKEND=backend)


def test_callbacks_average_warm_up_and_keep_the_best(tmp_path: Path) -> None:
    run(2, "fit:callbacks_average_warm_up_and_keep_the_best", str(tmp_path))


@pytest.mark.parametrize("backend", ["torch"])
def test_on_torch_gradients_are_final_when_backward_returns(backend: str) -> None:
    run(2, "fit:on_torch_gradients_are_final_when_backward_returns", KERAS_BACKEND=backend)


def test_beside_torch_in_one_process() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    run(2, "fit:beside_torch_in_one_process")
