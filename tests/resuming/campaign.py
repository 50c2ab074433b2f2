"""Random jobs, their runs, and the judge of their ledgers."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests import temporary
from tests.tf.support import ENVIRONMENT
from tests.worlds import HANGS_SECONDS, TORCH, Ended, Processes

Tell = Callable[[str], None]
SIZES = (1, 4, 2)
EPOCHS, SAMPLES = 3, 128
Ledger = Sequence[Sequence[Sequence[Any]]]
"""Lines by run and rank."""
GENTLE = (signal.SIGTERM, signal.SIGUSR1)
"""Signals after which a job saves and ends."""
WRITES, FULL = "while it writes", "on a full disk"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a job.

    Attributes:
        size: ranks.
        ending: the signal that ends it, `WRITES` (SIGKILL as soon as a checkpoint is written), or `FULL`.
        seconds: how long it trains before that.
        rank: which gets the signal.
    """

    size: int
    ending: int | str
    seconds: float
    rank: int


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that is run until it comes to its end.

    Attributes:
        kind: "torch" or "keras".
        workers: of its loader, with torch.
        every: steps between its checkpoints.
        runs: those that are ended; the last run has the size of the first.
    """

    kind: str
    workers: int
    every: int
    runs: Sequence[Run]

    @property
    def has_one_size(self) -> bool:
        """Whether all runs have as many ranks."""
        return len({run.size for run in self.runs}) == 1

    @classmethod
    def drawn(cls, seed: int, endings: Sequence[int | str]) -> Job:
        """Return a random job."""
        chance = random.Random(seed)
        count, first = chance.randint(1, 5), chance.choice(SIZES)
        sizes = [first] * count if chance.random() < 0.5 else [chance.choice(SIZES) for _ in range(count)]
        return cls(chance.choice(("torch", "torch", "keras")), chance.choice((0, 0, 2)), chance.randint(1, 5),
                   [Run(size, chance.choice(endings), chance.random() * 0.5, chance.randrange(size)) for size in sizes])


class Trial:
    """Carries a job out, in a directory of its own.

    Args:
        folder: an empty one.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._ledger, self._saved = job, folder / "ledger", folder / "checkpoints"
        self._ledger.mkdir()
        self._saved.mkdir()
        self.ended = 0
        """Runs that were ended before their job had come to its end."""

    def run(self) -> list[str]:
        """Return what was wrong."""
        for number, run in enumerate(self._job.runs):
            wrong = self._broken_off(number, run)
            if wrong is not None:
                return wrong
        number = len(self._job.runs)
        ended = self._start(number, self._job.runs[0].size, None)
        wrong = [f"the last run ended with {each.code}: {each.stderr[-500:]}" for each in ended if each.code]
        return wrong or [text for each in ended if "damaged" in (text := each.stderr)] or self._judged(number + 1)

    def _broken_off(self, number: int, run: Run) -> list[str] | None:
        ended = self._start(number, run.size, run)
        if not all(each.code == 0 for each in ended):
            self.ended += 1
            if any("has finished" in each.stdout for each in ended):
                return None  # the signal came too late
            if run.ending in GENTLE:
                return [f"run {number}: a stop ended with {each.code}: {each.stderr[-500:]}" for each in ended if each.code]
            if run.ending == FULL:
                named = [each for each in ended if "CheckpointError" not in each.stderr and "PeerFailed" not in each.stderr]
                return [f"run {number}: a full disk ended with {named[0].code}: {named[0].stderr[-500:]}"] if named else None
        elif run.ending in GENTLE:
            self.ended += 1
        return None

    def _start(self, number: int, size: int, run: Run | None) -> list[Ended]:
        """Run the job once; return how its ranks ended."""
        with self._world(size, self._saved, self._ledger, number, self._job.every) as world:
            if run is not None:
                self._end(world, run)
            return world.wait()

    def _world(self, size: int, saved: Path, ledger: Path, number: int, every: int) -> Processes:
        imported, environment = (TORCH, {}) if self._job.kind == "torch" else (("tensorflow", "keras"), ENVIRONMENT)
        return Processes(size, f"tests.resuming.programs.{self._job.kind}_job:train", str(saved), str(ledger), number,
                         self._job.workers, every, imported=imported, environment=environment)

    def _end(self, world: Processes, run: Run) -> None:
        try:
            world.wait_for(run.rank, "trains")
        except AssertionError:
            return  # it had nothing left to do
        time.sleep(run.seconds)
        if run.ending == FULL:
            (self._saved / "full").write_bytes(b"")
            subprocess.run(["dd", "if=/dev/zero", f"of={self._saved / 'full'}"], check=False, capture_output=True)
            world.wait()
            (self._saved / "full").unlink()
            return
        if run.ending == WRITES:
            deadline = time.monotonic() + HANGS_SECONDS
            while not list(self._saved.glob(".checkpoint-*")) and time.monotonic() < deadline:
                if world.ranks[run.rank].poll() is not None:
                    return
        if world.ranks[run.rank].poll() is None:
            world.kill(run.rank, signal.SIGKILL if run.ending == WRITES else int(run.ending))

    def _judged(self, runs: int) -> list[str]:
        lines = ledger_of(self._ledger, runs)
        gentle = [run.ending in GENTLE for run in self._job.runs]
        return judged(lines, gentle) or self._compared(lines)

    def _compared(self, lines: Ledger) -> list[str]:
        """Compare the losses with those of an undisturbed run."""
        if not self._job.has_one_size:
            return []
        whole = Path(tempfile.mkdtemp(dir=self._ledger.parent))
        for name in ("ledger", "checkpoints"):
            (whole / name).mkdir()
        size = self._job.runs[0].size
        with self._world(size, whole / "checkpoints", whole / "ledger", 0, 100_000) as world:
            world.wait()
        if self._job.kind == "keras":
            last, undisturbed = (json.loads((folder / f"weights.{run}.0").read_text()) for folder, run in (
                (self._ledger, len(self._job.runs)), (whole / "ledger", 0)))
            return [] if np.allclose(last, undisturbed, rtol=1e-4) else [f"weights {last}, undisturbed {undisturbed}"]
        wrong = []
        for rank in range(size):
            expected = {each["step"]: each["loss"] for each in _read(whole / f"ledger/0.{rank}")[1:]}
            for run, ranks in enumerate(lines):
                for each in ranks[rank][1:] if ranks else ():
                    if abs(each["loss"] - expected[each["step"]]) > 1e-9 * abs(expected[each["step"]]):
                        wrong.append(f"run {run}, rank {rank}, step {each['step']}: loss {each['loss']}, undisturbed "
                                     f"{expected[each['step']]}")
        return wrong[:3]


def ledger_of(folder: Path, runs: int) -> Ledger:
    """Return the lines of each rank of each run."""
    return [[_read(folder / f"{run}.{rank}") for rank in range(len(list(folder.glob(f"{run}.*"))))] for run in range(runs)]


def judged(lines: Ledger, gentle: Sequence[bool]) -> list[str]:
    """Return what is wrong with a ledger of finished steps: steps of a run count up to that with which the next one began.

    Args:
        gentle: whether a run was stopped with time to save.
    """
    begins = [min((rank[0]["begins"] for rank in ranks if rank), default=None) for ranks in lines]
    wrong, counted = [], collections.Counter[tuple[int, int]]()
    for run, ranks in enumerate(lines):
        following = next((each for each in begins[run + 1:] if each is not None), None)
        for begin, *steps in filter(None, ranks):
            if begin["begins"] != begins[run]:
                wrong.append(f"run {run}: ranks begin at different steps")
            last = max((each["step"] for each in steps), default=begins[run])
            if run < len(gentle) and gentle[run] and following not in (None, last):
                wrong.append(f"run {run} was stopped after step {last}, and the next one began after {following}")
            counted.update((each["epoch"], sample) for each in steps for sample in each["samples"]
                           if following is None or each["step"] <= following)
    different = [(key, counted.get(key, 0)) for key in itertools.product(range(EPOCHS), range(SAMPLES)) if counted[key] != 1]
    return wrong + [f"samples (epoch, number) and how often they count: {different[:5]}"] * bool(different)


def _read(path: Path) -> list[Any]:
    """Return the lines of a ledger; the last one may be torn."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def campaign(ends: int, first: int, tell: Tell) -> list[str]:
    """Run random jobs until so many runs have been ended; return what was wrong, by job."""
    wrong: list[str] = []
    seed, ended, counts = first, 0, collections.Counter[str]()
    while ended < ends:
        endings: Sequence[int | str] = (*GENTLE, signal.SIGKILL, signal.SIGKILL, WRITES)
        job = Job.drawn(seed, endings)
        found, count = attempt(job)
        ended += count
        counts.update(str(run.ending) for run in job.runs)
        tell(f"seed {seed}: {count} ended, {ended} in all{'; ' + found[0] if found else ''}")
        wrong += [f"seed {seed}: {job}: {each}" for each in found]
        seed += 1
    tell(f"endings: {dict(counts)}")
    return wrong


def attempt(job: Job, full_disk: bool = False) -> tuple[list[str], int]:
    """Carry a job out; return what was wrong, and how many of its runs were ended.

    Args:
        full_disk: its checkpoints are on a small file system; needs root.
    """
    with tempfile.TemporaryDirectory(prefix=temporary.prefix("resuming")) as folder:
        trial = Trial(job, Path(folder))
        if full_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", f"{folder}/checkpoints"], check=True)
        try:
            return trial.run(), trial.ended
        finally:
            if full_disk:
                subprocess.run(["umount", f"{folder}/checkpoints"], check=True)
