"""For all tests of elastic jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.elastic.jobs import Job


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """A list for jobs, which are ended."""
    started: list[Job] = []
    yield started
    for job in started:
        job.close()
