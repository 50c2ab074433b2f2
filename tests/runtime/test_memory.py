"""Memory, descriptors and threads of a job come back when what needed them is gone."""

from __future__ import annotations

import sys

import pytest

from tests.runtime.programs import memory as programs
from tests.worlds import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts come from /proc")


def test_the_buckets_of_sets_that_are_gone_go_back() -> None:
    processes(2, programs.the_buckets_of_sets_that_are_gone_go_back)


def test_the_buckets_of_layouts_that_are_evicted_go_back() -> None:
    processes(2, programs.the_buckets_of_layouts_that_are_evicted_go_back)


@pytest.mark.parametrize("collects", [False, True])
def test_jobs_one_after_the_other_leave_nothing(collects: bool) -> None:
    processes(2, programs.jobs_one_after_the_other_leave_nothing, collects)


def test_a_shared_file_without_a_range_left_means_no_buckets() -> None:
    processes(2, programs.a_shared_file_without_a_range_left_means_no_buckets)
