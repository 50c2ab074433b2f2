"""`DistributedOptimizer(..., sharded=True)`: bit for bit like the whole optimizer, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tf.support import BACKENDS, ENVIRONMENT, PROGRAMS, imported, run
from tests.worlds import HANGS_SECONDS, Processes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_optimizer_trains_as_unsharded(backend: str, size: int) -> None:
    run(size, "sharded:every_optimizer_trains_as_unsharded", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_trains_as_unsharded(backend: str) -> None:
    run(2, "sharded:fit_trains_as_unsharded", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_loads_on_another_number_of_ranks(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")
    run(2, "sharded:half_on_these_ranks", str(tmp_path), False, KERAS_BACKEND=backend)
    run(3, "sharded:half_on_these_ranks", str(tmp_path), True, KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_refused(backend: str) -> None:
    run(2, "sharded:refused", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_ranks_than_variables(backend: str) -> None:
    run(2, "sharded:more_ranks_than_variables", KERAS_BACKEND=backend)


def test_some_ranks() -> None:
    run(3, "sharded:some_ranks", KERAS_BACKEND="torch")


def test_ranks_that_differ_are_told() -> None:
    with Processes(2, f"{PROGRAMS}.sharded:only_one_is_sharded", environment={**ENVIRONMENT, "KERAS_BACKEND": "torch"},
                   imported=imported("torch")) as world:
        ended = world.wait(HANGS_SECONDS)
    assert all(rank.code for rank in ended)
    assert any("rank 1 waits for 'keras.optimizer.0.sharded=True" in rank.stderr for rank in ended), ended
