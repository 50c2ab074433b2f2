"""CPU hogs: processes that compete with the ranks of a benchmark for cores, as the other users of a busy machine do.

Four kinds take turns: steady, in bursts of a few milliseconds, and both of them pinned to a core. A hog ends with the
process that started it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

BURST_SECONDS = 0.001, 0.008


def start(count: int) -> list[subprocess.Popen[bytes]]:
    """Start `count` hogs."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    command = [sys.executable, str(Path(__file__).resolve())]
    started = []
    for number in range(count):
        comes_and_goes, is_pinned = number % 2, number % 4 >= 2 and cores
        core = cores[number // 4 % len(cores)] if is_pinned else -1
        started.append(subprocess.Popen([*command, str(os.getpid()), str(comes_and_goes), str(core)]))
    return started


def stop(hogs: list[subprocess.Popen[bytes]]) -> None:
    """End hogs."""
    for hog in hogs:
        hog.kill()
        hog.wait()


def main() -> None:
    parent, comes_and_goes, core = map(int, sys.argv[1:])
    if core >= 0:
        os.sched_setaffinity(0, {core})
    while os.getppid() == parent:
        until = time.monotonic() + random.uniform(*BURST_SECONDS)
        while time.monotonic() < until:
            pass
        if comes_and_goes:
            time.sleep(random.uniform(*BURST_SECONDS))


if __name__ == "__main__":
    main()
