"""Jobs beside other jobs and other users, jobs whose launcher is killed, and functions that ranks call."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvdlite_runner.host.reaper import marked_processes
from tests.bootstrap.other_user import OTHER
from tests.chaos.rows import Row, Trouble
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, ROOT, clean_environment, free_port, shared_memory

REDUCING = [sys.executable, "-m", "tests.chaos.programs.reducing"]


class Started:
    """A job of ours, with temporary files in a folder, and a mark by which its processes are found.

    Args:
        commands: of one launcher, or of each rank, with the variables that its rank is given.
    """

    def __init__(self, folder: str, *commands: tuple[list[str], dict[str, str]]) -> None:
        self.mark = f"TEST_JOB={secrets.token_hex(8)}"
        name, _, value = self.mark.partition("=")
        environment = {**clean_environment("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_"), name: value, "TMPDIR": folder,
                       "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "HVDLITE_START_TIMEOUT": "60"}
        self.processes = [subprocess.Popen(command, env={**environment, **given}, cwd=ROOT, text=True,
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command, given in commands]

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the first code that is not 0, and everything that was printed."""
        texts = [process.communicate(timeout=2 * HANGS_SECONDS)[0] for process in self.processes]
        return next((process.returncode for process in self.processes if process.returncode), 0), "".join(texts)

    def wait_until_empty(self) -> None:
        """Wait until no process of the job is left."""
        until = time.monotonic() + HANGS_SECONDS
        while left := marked_processes(self.mark.encode()):
            assert time.monotonic() < until, f"processes are left behind: {left}"
            time.sleep(0.01)


def _by_hvdrun(folder: str, *words: object) -> Started:
    return Started(folder, ([*HVDRUN, "-np", "2", *REDUCING, *map(str, words)], {}))


def _by_ids(folder: str, *words: object) -> Started:
    """Start ranks as torchrun does: they find each other by the job's ids."""
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
             "TORCHELASTIC_RUN_ID": "none"}
    return Started(folder, *[([*REDUCING, *map(str, words)], {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                             for rank in range(2)])


@contextlib.contextmanager
def temporary_files() -> Iterator[str]:
    """Provide a folder for temporary files, in which nothing of ours may be left, nor in /dev/shm."""
    shared = shared_memory()
    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as name:
        yield name
        until = time.monotonic() + HANGS_SECONDS
        while left := [each.name for each in os.scandir(name)
                       if "hvdlite" in each.name and each.stat(follow_symlinks=False).st_uid != OTHER]:
            assert time.monotonic() < until, f"files are left behind: {left}"
            time.sleep(0.01)
    assert shared_memory() <= shared


def killed_launcher(chance: random.Random, row: Row) -> None:
    """Kill hvdrun (SIGKILL) while its ranks start, meet or reduce: they end, and nothing is left."""
    with temporary_files() as folder:
        job = _by_hvdrun(folder, 10, 10**6)
        time.sleep(chance.uniform(0.0, 3.0))
        job.processes[0].kill()
        job.end()
        job.wait_until_empty()
    row.tried += 1
    row.refused += 1


def beside_each_other(chance: random.Random, row: Row) -> None:
    """Run several jobs at once with one folder for temporary files; one of them may be killed."""
    with temporary_files() as folder:
        jobs = [chance.choice([_by_hvdrun, _by_ids])(folder, chance.choice([10, 30_000]), chance.choice([5, 100]))
                for _ in range(3)]
        victim = _by_hvdrun(folder, 10, 10**6) if chance.random() < 0.5 else None
        ends = [job.end() for job in jobs]
        if victim is not None:
            chance.choice(victim.processes).send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
            victim.end()
            victim.wait_until_empty()
    for code, text in ends:
        assert code == 0 and text.count("reduced") == 2, text
    row.tried += len(jobs)
    row.survived += len(jobs)


def another_user(chance: random.Random, row: Row) -> None:
    """Run a job where another user makes directories and links under every name that the job may use."""
    with temporary_files() as folder:
        os.chmod(folder, 0o1777)
        os.chmod(Path(folder).parent, os.stat(Path(folder).parent).st_mode | 0o011)
        with subprocess.Popen([sys.executable, "-m", "tests.chaos.programs.neighbour", folder, str(chance.getrandbits(30))],
                              cwd=ROOT, env={**clean_environment(), "PYTHONPATH": PYTHON_PATH}, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as neighbour:
            assert neighbour.stdout is not None and neighbour.stdout.readline() == "ready\n"
            job = chance.choice([_by_hvdrun, _by_ids])(folder, 10, chance.choice([5, 1000]))
            asked = subprocess.run([*HVDRUN, "--report"], env={**clean_environment(), "TMPDIR": folder,
                                                               "PYTHONPATH": PYTHON_PATH},
                                   cwd=ROOT, capture_output=True, text=True, timeout=HANGS_SECONDS, check=False)
            code, text = job.end()
            acts, _ = neighbour.communicate()
    assert "Traceback" not in asked.stderr, asked.stderr
    assert code == 0 and text.count("reduced") == 2, text
    row.tried += int(acts)
    row.refused += int(acts)
    row.survived += 1


def functions(chance: random.Random, row: Row) -> None:
    """Let ranks call a function in which one may raise or be killed, in a directory of hostile modules."""
    end, who = chance.choice(["", "raise", "kill"]), chance.randrange(2)
    with temporary_files() as folder, tempfile.TemporaryDirectory(prefix="hostile-") as hostile:
        for module in ("msgspec", "ast", "cloudpickle", "hvdlite", "json", "hvdlite_runner"):
            Path(hostile, f"{module}.py").write_text("print('HOSTILE')\nraise SystemExit(1)\n", encoding="utf-8")
        size = chance.choice([10, 100_000])
        ended = subprocess.run([sys.executable, str(ROOT / "tests/chaos/programs/calling.py"), str(size), end, str(who)],
                               env={**clean_environment(), "PYTHONPATH": PYTHON_PATH, "TMPDIR": folder}, cwd=hostile,
                               capture_output=True, text=True, timeout=2 * HANGS_SECONDS, check=False)
    told = ended.stdout + ended.stderr
    assert "HOSTILE" not in told, told
    row.tried += 1
    if not end:
        assert ended.returncode == 0 and "called" in ended.stdout, told
        row.survived += 1
        return
    reason = "the script's own" if end == "raise" else rf"rank {who}\b.*(killed|SIGKILL)"
    assert ended.returncode and re.search(reason, told), told
    row.refused += 1


def _needs_root() -> str:
    return "" if os.geteuid() == 0 else "needs root, to act as another user"


JOBS = (Trouble("hvdrun killed in plain jobs", killed_launcher, 2),
        Trouble("several jobs at once", beside_each_other, 2),
        Trouble("another user in the folder for temporary files", another_user, 1, _needs_root),
        Trouble("functions that ranks call, among hostile modules", functions, 2))
