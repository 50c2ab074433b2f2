"""Does `hvd.slowness()` find the slow rank, and why? Trials with a cause, and trials without one.

    python -m tests.torch.slowness --trials 100 --controls 20
    python -m tests.torch.slowness --under ddp

A job trains all the time. In a trial one of its ranks is made slow in one way, by a random amount; after some seconds
`slowness` has to name this rank and the cause. Two jobs share the trials: one on one host, and one on three hosts, for what
happens on a network. Beside each outcome stands how much of the machine other processes used meanwhile, from /proc/stat, so
a busy machine is seen. It is a command of its own: it takes a quarter of an hour, and needs two quiet cores, and root for
the hosts (without it the second job is left out).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.runner.networks import unavailable
from tests.torch.slowness import hosts, one_host
from tests.torch.slowness.outcomes import recorded, summary

JOBS: dict[str, Any] = {"one_host": one_host, "hosts": hosts}
UNDER = {"optimizer": [*one_host.CAUSES, *hosts.CAUSES], "ddp": [*one_host.CAUSES, "link"],
         "accelerate": [*one_host.CAUSES, "link"], "fsdp2": [*one_host.CAUSES]}
"""What a job trains with, and which causes it can have: DDP refuses gradients that one rank lacks, and FSDP2 hides no
exchange behind a backward pass that needs no core.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--controls", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--under", choices=UNDER, default="optimizer", help="what the job trains with")
    parser.add_argument("--causes", nargs="+", choices=UNDER["optimizer"], help="in turn; all, unless given")
    parser.add_argument("--path", type=Path, help="add the outcomes to this file, a line of JSON each")
    parser.add_argument("--rank", choices=JOBS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.causes = options.causes or UNDER[options.under]
    if options.rank:
        torch.set_num_threads(1)
        JOBS[options.rank].ranks_program(options.causes[:options.trials], options.controls, options.seed, options.path,
                                                options.under)
        return 0
    why_not = unavailable()
    if why_not:
        print(f"no trials on several hosts, where a link is slow or a parameter frozen: {why_not}", file=sys.stderr)
    jobs = [name for name, job in JOBS.items() if set(job.CAUSES) & set(options.causes) and not (why_not and job is hosts)]
    causes = [cause for cause in options.causes if any(cause in JOBS[name].CAUSES for name in jobs)]
    plan = [causes[number % len(causes)] for number in range(options.trials)]
    with tempfile.TemporaryDirectory(prefix="hvdlite-slowness-") as folder:
        path = (options.path or Path(folder) / "outcomes").absolute()
        for number, name in enumerate(jobs):
            controls = len(range(number, options.controls, len(jobs)))
            code = run(name, [cause for cause in plan if cause in JOBS[name].CAUSES], controls, options.seed, path,
                       options.under)
            if code:
                return code
        print(summary(recorded(path)))
    return 0


def run(job: str, causes: Sequence[str], controls: int, seed: int, path: Path, under: str) -> int:
    """Run a job; return its exit code."""
    program = [sys.executable, "-m", "tests.torch.slowness", "--rank", job, "--controls", str(controls), "--seed", str(seed),
               "--path", str(path), "--under", under, "--trials", str(len(causes)), "--causes", *(causes or one_host.CAUSES)]
    if job == "hosts":
        return hosts.run(program, path)
    return subprocess.run([sys.executable, "-m", "hvdlite_runner", "-np", "2", *program], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
