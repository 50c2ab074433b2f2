"""Who am I? Tables in, places out; and the real launchers that are at hand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.bootstrap.environments import ENVIRONMENTS, check_directory, find_place
from hvdlite.core.errors import LaunchError
from hvdlite.core.world import World


def test_alone() -> None:
    place = find_place({}, parent=1)
    assert place.environment == "none" and place.world == World()


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda row: row.name)
def test_every_row_of_the_table(environment: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    row = environment
    variables = {row.rank: "1", row.size: "3", row.local_rank: "1", row.local_size: "3"}  # type: ignore[attr-defined]
    marked = variables | dict.fromkeys(row.job, str(tmp_path))  # type: ignore[attr-defined]
    place = find_place(marked, parent=1)
    assert place.environment == row.name and place.world == World(1, 3, 1, 3)  # type: ignore[attr-defined]
    assert find_place(marked, parent=2).job_directory == place.job_directory, "ranks must derive the same directory"
    check_directory(find_place(variables, parent=1).job_directory)
    assert find_place(variables, parent=1).job_directory != find_place(variables, parent=2).job_directory


@pytest.mark.parametrize(("variables", "told"), [
    ({"HVDLITE_SIZE": "2"}, "HVDLITE_RANK is not set"),
    ({"RANK": "0"}, "WORLD_SIZE is not set"),
    ({"HVDLITE_RANK": "2", "HVDLITE_SIZE": "2"}, "rank 2 is not in 0..1"),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "several hosts"),
    ({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_SECRET": "xyz"}, "hexadecimal"),
    ({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_COORDINATOR": "nowhere"}, "not host:port"),
])
def test_a_contradiction_is_a_clear_error(variables: dict[str, str], told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        find_place(variables, parent=1)


SCRIPT = """
import hvdlite as hvd, numpy as np
hvd.init()
assert hvd.size() == 2 and hvd.allreduce(np.array(hvd.rank() + 1), op=hvd.Sum) == 3
print("fine")
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torchrun comes with torch")
def test_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                            str(tmp_path / "script.py")], capture_output=True, text=True, env=environment, timeout=100,
                           check=False)
    assert ended.returncode == 0 and ended.stdout.count("fine") == 2, ended.stderr
    assert not list(tmp_path.glob("hvdlite-*"))
