"""Ranks in processes that somebody else started: placing them, and whose error counts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdlite.core.errors import PeerLostError
from hvdlite.core.world import World
from hvdlite.launch import workers
from tests.worlds import HANGS_SECONDS


def test_ranks_of_a_node_follow_each_other() -> None:
    places = workers.assign_ranks(["b", "a", "b", "c", "a", "b"])
    assert [worker for worker, _ in places] == [0, 2, 5, 1, 4, 3]
    assert [world for _, world in places] == [World(0, 6, 0, 3, 0, 3), World(1, 6, 1, 3, 0, 2), World(2, 6, 2, 3, 0, 1),
                                              World(3, 6, 0, 2, 1, 3), World(4, 6, 1, 2, 1, 2), World(5, 6, 0, 1, 2, 3)]


def test_all_ranks_get_the_key_and_those_of_several_hosts_the_coordinator() -> None:
    given = workers.rank_variables(World(1, 2, 1, 2), "/job", "a:1", "ab")
    assert given["HVDLITE_SECRET"] == "ab" and "HVDLITE_COORDINATOR" not in given
    given = workers.rank_variables(World(1, 2, 0, 1, 1, 2), "/job", "a:1", "ab")
    assert given["HVDLITE_SECRET"] == "ab" and given["HVDLITE_COORDINATOR"] == "a:1"


def test_the_error_that_others_followed_from() -> None:
    own, consequence = KeyError("own"), PeerLostError("rank 1 failed", 1)
    assert workers.root_error({0: consequence, 1: own}) is own
    assert workers.root_error({2: consequence, 1: consequence}) is consequence


def test_a_directory_goes_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = workers.TemporaryJobDirectory()
    (Path(directory.path) / "failure.0.json").touch()
    directory.remove()
    directory.remove()
    assert not list(tmp_path.iterdir())
    code = ("import os, signal; from hvdlite.launch.workers import TemporaryJobDirectory; made = TemporaryJobDirectory(); "
            "print(made.path, flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False,
                            env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + HANGS_SECONDS
    while os.path.exists(killed.stdout.strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_place_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVDLITE_RANK", raising=False)
    with pytest.raises(ValueError), workers.as_rank({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "1"}):
        import hvdlite
        hvdlite.init()
        assert hvdlite.size() == 1
        raise ValueError
    assert "HVDLITE_RANK" not in os.environ and not hvdlite.is_initialized()
