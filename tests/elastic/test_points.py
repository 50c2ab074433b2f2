"""A member fails at each point of a change of worlds; the others finish the training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.points import Case, cases, run_case

OFTEN = ("growth: the donor has heard at which boundary to stop: kill", "growth: the joiner has met the others: kill",
         "hosts: the donor has told where it listens: exit", "growth: the donor has told its boundary: notice")
"""Those that every run of the tests includes: a planned change, a joiner, several hosts, and a notice."""


def test_the_cases_that_are_run_often_exist() -> None:
    assert set(OFTEN) <= set(map(str, cases()))


@pytest.mark.parametrize("case", [
    pytest.param(case, id=str(case), marks=[] if str(case) in OFTEN else [pytest.mark.long]) for case in cases()])
def test_a_member_that_fails_at_a_point(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path)
