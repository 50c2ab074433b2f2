"""Print each failing seed with its program; exit with 1 if there is one. See the package."""

from __future__ import annotations

import argparse
import itertools
import sys

from tests.fuzzing import report, seeds_of
from tests.torch.distributed.fuzz.calls import CALLS
from tests.torch.distributed.fuzz.faults import KINDS
from tests.torch.distributed.fuzz.jobs import fault_trials, fuzz
from tests.torch.distributed.fuzz.program import STEPS


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch.distributed.fuzz")
    parser.add_argument("--seeds", default="0:200", help="BEGIN:END, or one seed")
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks, with commas")
    parser.add_argument("--steps", default=f"0:{STEPS}", help="BEGIN:END, or one step; others make groups only")
    parser.add_argument("--only", default="", help=f"these calls only, with commas: {', '.join(CALLS)}")
    parser.add_argument("--faults", action="store_true", help="let one rank of each program do something wrong")
    parser.add_argument("--kinds", default=",".join(KINDS), help="these faults only, with commas")
    options = parser.parse_args()
    seeds, calls = seeds_of(options.seeds), [name for name in options.only.split(",") if name]
    failed = 0
    if options.faults:
        programs = itertools.product(seeds, map(int, options.ranks.split(",")))
        for trial in fault_trials(programs, tuple(options.kinds.split(","))):
            print(trial, flush=True)
            failed += bool(trial.problems)
        print(f"{failed} failed")
        return int(failed > 0)
    for size in map(int, options.ranks.split(",")):
        failed |= report(len(seeds), fuzz(seeds, size, calls, seeds_of(options.steps), print))
    return failed


if __name__ == "__main__":
    sys.exit(main())
