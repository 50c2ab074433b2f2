"""What killed tests have left is removed by the next ones, and nothing else."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.temporary import OLD_SECONDS, remove_old


def test_old_directories_of_processes_that_have_ended_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    removed = [f"hvdlite-{kind}-{ended.pid}-abc" for kind in ("test", "job")]
    kept = [f"hvdlite-test-{os.getpid()}-abc", f"hvdlite-chaos-{ended.pid}-abc", f"other-test-{ended.pid}-abc"]
    young = f"hvdlite-test-{ended.pid}-young"
    for name in (*removed, *kept, young):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        if name != young:
            os.utime(tmp_path / name, (0, time.time() - OLD_SECONDS - 1))
    remove_old(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, young])
