"""Print each failing seed with what was drawn; exit with 1 if there is one. See the package."""

from __future__ import annotations

import argparse
import sys

from tests.fuzzing import report, seeds_of
from tests.torch.trainings.jobs import SETTINGS, fuzz


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch.trainings")
    parser.add_argument("--seeds", default="0:1000", help="BEGIN:END, or one seed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--setting", type=int, help=f"use one environment only, 0 to {len(SETTINGS) - 1}")
    options = parser.parse_args()
    seeds = seeds_of(options.seeds)
    settings = SETTINGS if options.setting is None else SETTINGS[options.setting:options.setting + 1]
    return report(len(seeds), fuzz(seeds, options.ranks, device=options.device, settings=settings, tell=print))


if __name__ == "__main__":
    sys.exit(main())
