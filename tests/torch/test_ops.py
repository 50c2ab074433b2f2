"""The public functions of `hvdlite_torch`, on real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.torch.programs import ops as programs
from tests.worlds import TORCH, processes


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_dtype_and_layout(size: int) -> None:
    processes(size, programs.every_dtype_and_layout, imported=TORCH)


def test_handles_groups_and_names() -> None:
    processes(2, programs.handles_groups_and_names, imported=TORCH)


def test_every_error_condition_of_horovod_reaches_every_rank_and_the_job_goes_on() -> None:
    processes(2, programs.every_error_condition_of_horovod_reaches_every_rank_and_the_job_goes_on, imported=TORCH)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_collectives_are_those_that_can_be_written_down(size: int) -> None:
    """Every rank's loss is summed; Horovod averages upstream gradients, so ours are that sum divided by size."""
    processes(size, programs.gradients_of_collectives_are_those_that_can_be_written_down, imported=TORCH)


def test_state_travels() -> None:
    processes(2, programs.state_travels, imported=TORCH)


def test_reducescatter_alltoall_and_roots() -> None:
    processes(3, programs.reducescatter_alltoall_and_roots, imported=TORCH)


def test_gradients_are_the_derivatives_or_horovods() -> None:
    """Every rank's loss is a weighted sum of its result; the sum of all losses has a derivative that can be written down."""
    processes(2, programs.gradients_are_the_derivatives_or_horovods, imported=TORCH)


def test_process_sets_with_torch() -> None:
    processes(3, programs.process_sets_with_torch, imported=TORCH)
