"""Random faults in a model of elastic training: `python -m tests.negotiation --steps 100000`; exit with 1 if one fails."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.membership.model import play_job
from tests.negotiation.trainer import TrainingJob


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.negotiation")
    parser.add_argument("--steps", type=int, default=100_000, help="training steps that members of all jobs make together")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    began = time.monotonic()
    steps, worlds, deaths, stale, failed, seed = 0, 0, 0, 0, 0, options.first
    while steps < options.steps and failed < 10:
        job = TrainingJob(seed)
        try:
            play_job(job)
        except Exception:
            traceback.print_exc()
            failed += 1
        steps, worlds, stale, seed = steps + job.steps_made, worlds + len(job.worlds), stale + job.stale, seed + 1
        deaths += sum(not process.is_alive for process in job.processes.values())
    print(f"{steps} steps in {worlds} worlds of {seed - options.first} jobs; {deaths} processes ended, {stale} messages "
          f"came to a later world; {failed} jobs failed; {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
