"""The public functions of `hvdlite_torch`, on real processes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from hvdlite.core.array import BFLOAT16
from hvdlite.planes import arithmetic
from hvdlite_torch import framework
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


def test_torch_and_numpy_convert_16_bit_floats_to_the_same_bits() -> None:
    values = np.concatenate([np.linspace(-7e4, 7e4, 4001), [0.0, -0.0, np.inf, -np.inf, 1e-8, 6e-8, 65519.9, 1 + 2**-9]])
    values = np.concatenate([values, np.random.default_rng(1).standard_normal(5000)]).astype(np.float32)
    for dtype in (np.dtype(np.float16), BFLOAT16):
        results = []
        for casts in ((arithmetic.widen, arithmetic.narrow), (framework.widen, framework.narrow)):
            short, wide = np.empty(values.size, dtype), np.empty(values.size, np.float32)
            with np.errstate(all="ignore"):
                casts[1](values.copy(), short)
                casts[0](short, wide)
            results.append((short.view(np.uint16), wide.view(np.uint32)))
        assert np.array_equal(results[0][0], results[1][0]) and np.array_equal(results[0][1], results[1][1])


def test_reducescatter_alltoall_and_roots() -> None:
    processes(3, programs.reducescatter_alltoall_and_roots, imported=TORCH)


def test_gradients_are_the_derivatives_or_horovods() -> None:
    """Every rank's loss is a weighted sum of its result; the sum of all losses has a derivative that can be written down."""
    processes(2, programs.gradients_are_the_derivatives_or_horovods, imported=TORCH)


def test_process_sets_with_torch() -> None:
    processes(3, programs.process_sets_with_torch, imported=TORCH)
