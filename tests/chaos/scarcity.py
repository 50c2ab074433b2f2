"""Jobs on hosts that lack something: disk, /dev/shm, descriptors, memory. They work, or end soon with a reason."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from tests.chaos.programs import refusing
from tests.chaos.rows import Row, Trouble, reason_in
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, ROOT, SHRINKS, clean_environment, shared_memory

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
        under: the beginning of the command, which runs the rest with fewer rights.
    """

    shell: str
    elastic: bool = False
    oom_events: Path | None = None
    under: tuple[str, ...] = ()


def _job(chance: random.Random, row: Row, scarcity: Scarcity) -> None:
    """Run a job of two ranks, each of which reduces some tensors and prints."""
    flags = ["-np", "2", *(["--min-np", "1", *SHRINKS] if scarcity.elastic else [])]
    command = [*HVDRUN, *flags, sys.executable, "-m", "tests.chaos.programs.reducing", str(chance.choice([10, 1_000_000]))]
    shared = shared_memory()
    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as folder:
        ended = subprocess.run(["unshare", "-m", "sh", "-c", f'{scarcity.shell}\nexec "$@"', "sh",
                                *scarcity.under, *command],
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
    reason = reason_in(told)
    assert shared_memory() <= shared
    row.refused += 1
    row.remark = reason[:100]


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


def few_processes(chance: random.Random, row: Row) -> None:
    """Allow a user of its own, for whom the kernel counts processes, a few of them."""
    user = str(chance.randrange(60_000, 64_000))
    _job(chance, row, Scarcity(f'{_SHOW_PYTHON}chmod 777 "$FOLDER"', chance.random() < 0.3,
                               under=("prlimit", f"--nproc={chance.randrange(1, 40)}", *_as_user(user))))


def _as_user(user: str) -> tuple[str, ...]:
    """Return the beginning of a command of another user."""
    return "setpriv", "--reuid", user, "--regid", user, "--clear-groups"


def _closed(path: Path) -> Path | None:
    """Return the outermost directory on the way to a path that other users cannot enter, such as root's home."""
    return next((each for each in reversed((path, *path.parents)) if not each.stat().st_mode & 0o001), None)


def _showing(path: Path) -> str:
    """Return commands for a mount namespace of its own after which other users can reach a path."""
    closed = _closed(path)
    return "" if closed is None else (
        f"shown=$(mktemp -d) && mount --bind {path} $shown && mount -t tmpfs -o mode=755 none {closed} && "
        f"mkdir -p {path} && mount --move $shown {path} && rmdir $shown\n")


_SHOW_PYTHON = _showing(Path(sys.base_prefix))


def no_other_user() -> str:
    """Return why no other user can run jobs here, "" when one can."""
    if reason := unavailable():
        return reason
    if shutil.which("setpriv") is None:
        return "needs setpriv (util-linux)"
    script = "import os, sys, hvdlite, numpy; sys.exit(not os.access(sys.executable, os.X_OK))"
    tried = subprocess.run(["unshare", "-m", "sh", "-c", f'{_SHOW_PYTHON}exec "$@"', "sh", *_as_user("60000"),
                            sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False,
                           env={**clean_environment(), "PYTHONPATH": PYTHON_PATH})
    return "other users cannot run this Python" if tried.returncode else ""


def missing_calls(chance: random.Random, row: Row) -> None:
    """Let the kernel refuse to make memfds, eventfds and pidfds."""
    error = chance.choice([errno.ENOSYS, errno.EPERM])
    _job(chance, row, Scarcity("", chance.random() < 0.3, under=(sys.executable, refusing.__file__, str(error))))


def no_filter() -> str:
    """Return why system calls cannot be refused here, "" when they can."""
    if reason := unavailable():
        return reason
    tried = subprocess.run([sys.executable, refusing.__file__, "1", "true"], capture_output=True, check=False)
    return "needs seccomp" if tried.returncode else ""


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
              Trouble("jobs with few processes", few_processes, 1, no_other_user),
              Trouble("jobs without memfd, eventfd and pidfd", missing_calls, 1, no_filter),
              Trouble("jobs with little memory", little_memory, 1, unavailable))
