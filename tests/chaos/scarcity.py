"""Jobs on hosts that lack something: disk, /dev/shm, descriptors, memory. They work, or end soon with a reason."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from tests.chaos.rows import Row, Trouble
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, ROOT, clean_environment, shared_memory

MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
UNIFIED_CGROUP = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True)
class Scarcity:
    """What a job has to do without.

    Attributes:
        shell: commands that take it away, before the job; `$FOLDER` is an empty folder, where temporary files are made.
        elastic: whether the job may change its members.
        oom_events: a file of a control group that counts processes which the kernel has killed. hvdrun may be one, and then
            tells nothing.
    """

    shell: str
    elastic: bool = False
    oom_events: Path | None = None


def _job(chance: random.Random, row: Row, scarcity: Scarcity) -> None:
    """Run a job of two ranks, each of which reduces some tensors and prints."""
    flags = ["-np", "2", *(["--min-np", "1"] if scarcity.elastic else [])]
    command = [*HVDRUN, *flags, sys.executable, "-m", "tests.chaos.programs.reducing", str(chance.choice([10, 1_000_000]))]
    shared = shared_memory()
    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as folder:
        ended = subprocess.run(["unshare", "-m", "sh", "-c", f'{scarcity.shell}\nexec "$@"', "sh", *command],
                               env={**clean_environment(), "PYTHONPATH": PYTHON_PATH, "FOLDER": folder, "TMPDIR": folder,
                                    "OMP_NUM_THREADS": "1", "HVDLITE_START_TIMEOUT": "60"},
                               capture_output=True, cwd=ROOT, timeout=2 * HANGS_SECONDS, check=False)
    row.tried += 1
    if ended.returncode == 0:
        assert ended.stdout.count(b"reduced") == 2, ended
        row.survived += 1
        return
    if ended.returncode == -signal.SIGKILL and scarcity.oom_events and _oom_kills(scarcity.oom_events):
        row.refused += 1
        row.remark = "the kernel killed hvdrun itself"
        return
    told = ended.stderr.decode(errors="replace")
    reasons = ("hvdrun: ", "Error: ", "Cannot allocate memory", "No space left")
    assert any(reason in told for reason in reasons), f"exit code {ended.returncode} without a reason: {told[-2000:]!r}"
    assert shared_memory() <= shared
    row.refused += 1
    row.remark = next((line for line in told.splitlines() if line.startswith("hvdrun: ")), told.splitlines()[-1])[:100]


def _oom_kills(events: Path) -> int:
    """Return how many processes of a control group the kernel has killed for memory."""
    lines = events.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def full_disk(chance: random.Random, row: Row) -> None:
    """Fill the disk of temporary files, but for a few pages."""
    left = chance.choice([0, 4, 64])
    _job(chance, row, Scarcity(f'mount -t tmpfs -o size=1m none "$FOLDER" && dd if=/dev/zero of="$FOLDER/full" bs=1024 '
                               f'count={1024 - left} 2>/dev/null', chance.random() < 0.3))


def no_dev_shm(chance: random.Random, row: Row) -> None:
    """Take /dev/shm away."""
    _job(chance, row, Scarcity(chance.choice(["umount -l /dev/shm", "mount -t tmpfs -o ro,size=4k none /dev/shm"])))


def few_descriptors(chance: random.Random, row: Row) -> None:
    """Allow every process a few descriptors."""
    _job(chance, row, Scarcity(f"ulimit -n {chance.randrange(8, 80)}"))


def little_memory(chance: random.Random, row: Row) -> None:
    """Allow the job some MiB of memory: in a control group where one can be made, else of addresses (`ulimit -v`)."""
    limit = chance.randrange(30, 300) << 20
    name = f"hvdlite-chaos-{uuid.uuid4().hex[:8]}"
    group, file, events = (MEMORY_CGROUP / name, "memory.limit_in_bytes", "memory.oom_control")
    if not MEMORY_CGROUP.is_dir():
        group, file, events = (UNIFIED_CGROUP / name, "memory.max", "memory.events")
    try:
        group.mkdir()
        (group / file).write_text(str(limit), encoding="ascii")
    except OSError:
        _job(chance, row, Scarcity(f"ulimit -v {8 * limit >> 10}"))
        row.remark += " (ulimit -v)"
        return
    try:
        _job(chance, row, Scarcity(f"echo 0 > {group}/cgroup.procs", oom_events=group / events))
    finally:
        while group.exists():  # processes that were killed leave it when they are waited for
            try:
                group.rmdir()
            except OSError:
                continue


def unavailable() -> str:
    """Return why the namespace of mounts cannot be a job's own, "" when it can."""
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        return "needs Linux and unshare"
    return "" if os.geteuid() == 0 else "needs root, for mounts"


SCARCITIES = (Trouble("jobs with a full disk", full_disk, 1, unavailable),
              Trouble("jobs without /dev/shm", no_dev_shm, 1, unavailable),
              Trouble("jobs with few descriptors", few_descriptors, 1, unavailable),
              Trouble("jobs with little memory", little_memory, 1, unavailable))
