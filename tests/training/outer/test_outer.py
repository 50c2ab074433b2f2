"""`training.outer` on ranks that are processes: workers of one rank, of hosts, and of different numbers of ranks."""

from __future__ import annotations

import pytest

from tests.training.outer.programs import skips
from tests.training.outer.programs import training as programs
from tests.worlds import HANGS_SECONDS, Processes, processes

WORKERS = pytest.mark.parametrize(("hosts", "workers"), [
    ((2,), "rank"), ((4,), "rank"), ((1, 1, 1), "host"), ((2, 1), "host"), ((2, 2), "host")])


@WORKERS
def test_it_equals_the_oracle(hosts: tuple[int, ...], workers: str) -> None:
    processes(sum(hosts), programs.equals_the_oracle, workers, hosts=hosts)


@WORKERS
def test_local_sgd_averages(hosts: tuple[int, ...], workers: str) -> None:
    processes(sum(hosts), programs.local_sgd_averages, workers, hosts=hosts)


def test_merging_everything_averages() -> None:
    processes(3, programs.synchronizing_averages)


@pytest.mark.parametrize(("hosts", "workers"), [((3,), "rank"), ((2, 1), "host")])
def test_it_resumes_anywhere(hosts: tuple[int, ...], workers: str) -> None:
    processes(sum(hosts), programs.resumes_anywhere, workers, hosts=hosts)


@pytest.mark.parametrize(("hosts", "workers"), [((3,), "rank"), ((2, 2), "host")])
def test_merges(hosts: tuple[int, ...], workers: str) -> None:
    processes(sum(hosts), programs.merges, workers, hosts=hosts)


def test_what_is_not_finite_is_skipped() -> None:
    processes(3, skips.skips_what_is_not_finite)


def test_a_worker_recovers_in_all_fragments() -> None:
    processes(2, skips.recovers_in_all_fragments)
    processes(2, skips.what_is_under_way_replaces_reset_weights)


def test_everything_is_merged_after_a_skip() -> None:
    processes(2, skips.synchronizes_after_a_skip)


def test_a_skip_is_said_once() -> None:
    ended = processes(2, skips.is_said_once)
    assert [rank.stderr.count("is left out on all ranks") for rank in ended] == [1, 1], ended


def test_everything_is_merged_in_the_first_period() -> None:
    processes(2, programs.synchronizing_in_the_first_period)


def test_unusual_parameters() -> None:
    processes(2, programs.unusual_parameters)


def test_errors_belong_to_a_rank() -> None:
    processes(2, programs.errors_belong_to_a_rank)


def test_the_delay_is_measured() -> None:
    processes(2, programs.measures_the_delay)


def test_what_is_refused() -> None:
    processes(2, programs.refused)


@pytest.mark.parametrize("skips", [False, True])
def test_a_rank_that_ends_early_is_named(skips: bool) -> None:
    with Processes(3, programs.a_rank_ends_early, skips) as world:
        ended = world.wait(HANGS_SECONDS)
    assert [rank.code for rank in ended] == [0, 0, 0], ended
    assert ["named" in rank.stdout for rank in ended] == [True, False, True], ended


def test_a_rank_that_dies_is_named() -> None:
    with Processes(3, programs.a_rank_dies) as world:
        ended = world.wait(HANGS_SECONDS)
    assert ended[1].code == 3 and ended[0].code and ended[2].code, ended
    assert all("named" in ended[rank].stdout for rank in (0, 2)), ended
