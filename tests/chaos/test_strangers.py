"""A little of `make chaos`: strangers at each listener of a job, always the same ones."""

from __future__ import annotations

import pytest

from tests.chaos.rows import Trouble, rounds
from tests.chaos.strangers import STRANGERS


@pytest.mark.parametrize("trouble", STRANGERS, ids=lambda trouble: trouble.what)
def test_strangers(trouble: Trouble) -> None:
    row = rounds(trouble, seed=1, seconds=0.0, numbers=[0])
    assert not row.wrong, "\n".join(row.wrong)
    assert row.survived and row.tried and row.refused
