"""Members of elastic jobs that flood hvdrun, or lie to it, once it knows them."""

from __future__ import annotations

import math
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.jobs import Started, temporary_files
from tests.chaos.programs.flooding import MODES
from tests.chaos.rows import Row, Trouble, no_traceback_in, reason_in
from tests.worlds import HANGS_SECONDS, HVDRUN, SHRINKS

MOST_MEMORY = 100 << 10
"""KiB of hvdrun."""
INTERRUPT_SECONDS = 30.0
"""From Ctrl-C to the end of hvdrun, on a machine that has other work."""


def member(chance: random.Random, row: Row) -> None:
    """Let a member flood or lie: the others train to their end, or hvdrun ends the job and names it; so does Ctrl-C."""
    mode, culprit, interrupted = chance.choice(list(MODES)), chance.randrange(3), chance.random() < 0.3
    with temporary_files() as folder, tempfile.TemporaryDirectory() as other:
        told = Path(other, "told")
        program = [sys.executable, "-m", "tests.chaos.programs.flooding", mode, culprit, chance.randrange(60),
                   chance.getrandbits(30), told]
        flags = ["-np", "3", "--min-np", "1", *SHRINKS, *(["--monitor"] if chance.random() < 0.5 else [])]
        job = Started(folder, ([*HVDRUN, *flags, *map(str, program)], {}))
        (hvdrun,) = job.processes
        most = _watch(hvdrun, told, chance.uniform(0.0, 0.5) if interrupted else None)
        asked = time.monotonic()
        code, text = job.end()
        took = time.monotonic() - asked
        job.wait_until_empty()
    row.tried += 1
    row.remark = f"hvdrun had {max(most, int(row.remark.split()[2]) if row.remark else 0)} KiB at most"
    what = f"{mode} of rank {culprit}, interrupted {interrupted}, code {code}, {most} KiB, {took:.1f} s: {text[-4000:]}"
    assert most < MOST_MEMORY, what
    assert "\x1b" not in text and "\x9b" not in text, repr(what)
    no_traceback_in(text)
    has_trained = text.count("trained") >= 2
    if code == 0:
        assert has_trained, what
        row.survived += 1
        return
    if interrupted and code in (128 + signal.SIGINT, -signal.SIGINT):
        assert has_trained or "hvdrun: ended by SIGINT" in text, what  # after the end of the job there is nothing to say
        assert took < INTERRUPT_SECONDS, what
    else:
        assert re.search(rf"rank {culprit}\b", reason_in(text)), what
    row.refused += 1


def _watch(hvdrun: subprocess.Popen[str], told: Path, interrupt_after: float | None) -> int:
    """Return the most memory that hvdrun had, in KiB, once it has ended or Ctrl-C was sent.

    Args:
        told: a file that the member makes when it begins.
        interrupt_after: seconds from then to Ctrl-C; None: none is sent.
    """
    most, until, begun = 0, time.monotonic() + 2 * HANGS_SECONDS, math.inf
    while hvdrun.poll() is None and time.monotonic() < until:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{hvdrun.pid}/status").read_text(encoding="ascii"))
        most = max(most, int(found[1]) if found else 0)  # an ended process has none
        if told.exists():
            begun = min(begun, time.monotonic())
        if interrupt_after is not None and time.monotonic() > begun + interrupt_after:
            hvdrun.send_signal(signal.SIGINT)
            break
        time.sleep(0.02)
    return most


def unavailable() -> str:
    """Return why the memory of hvdrun cannot be read here, "" when it can."""
    return "" if sys.platform.startswith("linux") else "needs Linux, for the memory of hvdrun"


FLOODS = (Trouble("a flood after a valid hello", member, 2, unavailable),)
