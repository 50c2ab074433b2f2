"""Random kills in many elastic jobs: no hang, nothing left, exit code 0, survivors keep their processes, replicas agree."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.elastic.jobs import Job, hurt

STEPS = 600


def draw(seed: int, folder: Path) -> tuple[Job, random.Random, int, int]:
    """Start the job of a seed; return it with what the rest is drawn from, its founders and its kills."""
    chance = random.Random(seed)
    size = chance.choice([2, 3, 4])
    flags = ["-np", str(size), "--min-np", "1"]
    kind = chance.choice(["fixed", "cooldown", "discovery"])
    if kind == "cooldown":
        flags += ["--blacklist-cooldown-range", "1", "2"]
    if kind == "discovery":
        script = folder / "hosts.sh"
        script.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:2\n", encoding="ascii")
        script.chmod(0o755)
        flags += ["--max-np", "4", "--host-discovery-script", str(script)]
    return Job(flags, folder, STEPS), chance, size, min(size - 1, 2)  # three without a commit between them end a job


def one(seed: int) -> tuple[int, str]:
    """Run the job of a seed; return how many members were killed, and "" or what was wrong."""
    with tempfile.TemporaryDirectory(prefix="hvdlite-elastic-") as name:
        job, chance, founders, kills = draw(seed, Path(name))
        done: list[str] = []
        try:
            job.wait_for_all(founders)  # a death outside elastic.run ends the job
            job.wait_for_step(chance.randrange(STEPS // 2))
            done = hurt(job, chance, kills, seconds=chance.choice([0.1, 1.0, 4.0]))
            job.succeed()
        except AssertionError as error:
            return len(done), f"seed {seed}: killed {done}: {error}"
        finally:
            job.close()
    return len(done), ""


def campaign(kills: int, first: int, tell: Callable[[str], object]) -> list[str]:
    """Run jobs from a seed on until so many members were killed; return what was wrong."""
    wrong: list[str] = []
    total, seed = 0, first
    while total < kills:
        count, problem = one(seed)
        total += count
        tell(f"seed {seed}: {count} killed, {total} of {kills}{': WRONG' if problem else ''}")
        if problem:
            wrong.append(problem)
            tell(problem)
        seed += 1
    return wrong
