"""`kill -9` of any rank at a random moment, with DataLoader workers alive.

HVDLITE's environment is strict, so the number of tries is a plain variable: KILL_TRIES=50 for the long version.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.runner.kills import kill_a_rank

pytest.importorskip("torch")

@pytest.mark.slow
@pytest.mark.parametrize("seed", [each if each in (0, 3) else pytest.param(each, marks=pytest.mark.long)
                                  for each in range(int(os.environ.get("KILL_TRIES", "4")))])
def test_a_rank_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    print(kill_a_rank(random.Random(seed), tmp_path))
