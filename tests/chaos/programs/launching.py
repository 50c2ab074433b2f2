"""A launcher that runs job after job, and compares what it holds."""

from __future__ import annotations

import glob
import os
import tempfile
import time

from hvdlite.core.launch_contract import DIRECTORY_PREFIX
from hvdlite_runner.cli import main
from tests.chaos.programs.repeating import held


def jobs(seconds: float) -> tuple[int, int, int, int]:
    """Run jobs of two ranks that end at once, as hvdrun does; return what `repeating.starts` returns."""
    began, count, before = time.monotonic(), 0, None
    for name in [name for name in os.environ if name.startswith("HVDLITE_")]:
        del os.environ[name]
    while before is None or time.monotonic() < began + seconds:
        assert main(["-np", "2", "--", "true"]) == 0
        count += 1
        if before is None and time.monotonic() >= began + seconds / 3:
            before = held()
    after = held()
    assert not glob.glob(f"{tempfile.gettempdir()}/{DIRECTORY_PREFIX}{os.getpid()}-*")
    return count, after[0] - before[0], after[1] - before[1], after[2] - before[2]
