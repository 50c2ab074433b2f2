"""`kill -9` of any rank at a random moment, with DataLoader workers alive."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from hvdlite_runner.host.reaper import marked_processes
from tests.worlds import HANGS_SECONDS, HVDRUN, shared_memory


def kill_a_rank(chance: random.Random, folder: Path) -> str:
    """Run a job, kill a rank of it, and check how it ends; return what was done.

    Args:
        chance: which rank, and when.
        folder: an empty one.
    """
    size, tag = chance.choice([2, 3]), f"kill-{os.getpid()}-{folder.name}"
    victim, delay = chance.randrange(size), chance.choice([0.0, chance.uniform(0, 4)])
    shared = shared_memory()
    command = [*HVDRUN, "-np", str(size), sys.executable]
    run = subprocess.Popen([*command, str(Path(__file__).parent / "programs/loaders.py")],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "TEST_JOB": tag,
                                "HVDLITE_START_TIMEOUT": "20"})
    assert run.stdout is not None
    pids: dict[int, int] = {}
    training = chance.random() < 0.7  # else: while the ranks still start
    seen = 0
    for line in run.stdout:
        if match := re.search(r"pid (\d+) (\d+)", line):
            pids[int(match[1])] = int(match[2])
        seen += "training" in line
        if len(pids) == size and (not training or seen == size):
            break
    time.sleep(delay if training else delay / 4)
    os.kill(pids[victim], signal.SIGKILL)
    started = time.monotonic()
    _, errors = run.communicate(timeout=HANGS_SECONDS)
    took = time.monotonic() - started
    assert run.returncode == 128 + signal.SIGKILL, errors
    assert f"hvdrun: rank {victim} failed first: killed by signal 9 (SIGKILL)" in errors
    if training:
        for rank in set(range(size)) - {victim}:
            lines = [line for line in errors.splitlines() if line.startswith(f"[{rank}]")]
            assert any(f"rank {victim} was lost" in line for line in lines), f"rank {rank} does not name {victim}\n{errors}"
    told = f"size {size}, victim {victim}, training {training}, over after {took:.2f} s"
    assert not marked_processes(f"TEST_JOB={tag}".encode()), "a process was left behind"
    assert not list(folder.glob("*hvdlite*")), "a file of ours was left behind"  # torch leaves caches of its own
    assert shared_memory() <= shared
    return told
