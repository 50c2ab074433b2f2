"""Ranks on GPUs: every collective and dtype, mixed jobs, sets, CuPy, streams, failures."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.gpu.programs import ranks as programs
from tests.gpu.support import run
from tests.worlds import Processes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_reduction_and_dtype(size: int) -> None:
    run(size, programs.every_reduction_and_dtype)


@pytest.mark.parametrize("size", [2, 4])
def test_every_other_collective(size: int) -> None:
    run(size, programs.every_other_collective)


def test_process_sets_and_join() -> None:
    run(3, programs.process_sets_and_join)


def test_arrays_of_cupy() -> None:
    run(2, programs.arrays_of_cupy)


def test_streams_order_the_work_and_the_host_goes_on() -> None:
    run(1, programs.streams_order_the_work_and_the_host_goes_on)


def test_memory_of_dropped_tensors_is_not_reused_too_early() -> None:
    run(2, programs.memory_of_dropped_tensors_is_not_reused_too_early)


def test_a_collective_in_a_graph_is_refused_and_graphs_of_the_model_work() -> None:
    run(1, programs.a_collective_in_a_graph_is_refused_and_graphs_of_the_model_work)


def test_two_ranks_on_one_gpu_are_told() -> None:
    import torch
    if torch.cuda.device_count() > 1:
        pytest.skip("there is a GPU for each")
    with Processes(2, programs.a_gpu_that_two_share) as world:
        for ended in world.wait(90):
            assert ended.code == 0, ended


def test_a_death_ends_the_others_soon() -> None:
    with Processes(2, programs.train_without_end) as world:
        world.wait_for(0, "trains", 90)
        world.wait_for(1, "trains", 90)
        world.kill(1)
        first, second = world.wait(60)
    assert second.code == -9
    assert first.code == 1 and "rank 1" in first.stderr, first
