"""An `init()` that fails leaves nothing behind, tells the other ranks, and can be called again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.runtime.programs import init_fails as programs
from tests.worlds import ROOT, processes


@pytest.mark.parametrize("size", [1, 2])
def test_process_sets_that_cannot_be(size: int) -> None:
    processes(size, programs.process_sets_that_cannot_be)


def test_a_further_init_that_fails_leaves_the_runtime_to_the_others() -> None:
    processes(2, programs.a_further_init_that_fails_leaves_the_runtime_to_the_others)


@pytest.mark.parametrize("size", [1, 2])
def test_a_timeline_that_cannot_be_written(size: int) -> None:
    """Only rank 0 writes it and fails; the others hear why, in init() or in their next call."""
    processes(size, programs.a_timeline_that_cannot_be_written)


def test_a_plane_that_cannot_be_made() -> None:
    """It is chosen when the ranks have met and share their memory."""
    processes(2, programs.a_plane_that_cannot_be_made)


def test_no_memory_for_the_plane() -> None:
    processes(2, programs.no_memory_for_the_plane)


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("HVDLITE_RANK", "HVDLITE_SIZE")])
def test_a_leftover_environment_is_named_while_nobody_else_comes(names: tuple[str, str]) -> None:
    program = "import hvdlite, hvdlite.runtime.meeting as m; m.LATE_SECONDS = 0.01; hvdlite.init()"
    others = {name: value for name, value in os.environ.items() if not name.startswith("HVDLITE_")}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT,
                           env={**others, names[0]: "0", names[1]: "2", "HVDLITE_START_TIMEOUT": "0.5"})
    assert ended.returncode == 1
    assert f"has waited 0.01 s for rank 1: the environment says {names[0]}=0 and {names[1]}=2. If" in ended.stderr
