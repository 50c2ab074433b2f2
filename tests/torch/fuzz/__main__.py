"""Print each failing seed with its program; exit with 1 if there is one. See the package."""

from __future__ import annotations

import argparse
import sys

from tests.fuzzing import report, seeds_of
from tests.torch.fuzz.jobs import SETTINGS, fuzz
from tests.torch.fuzz.program import FEATURES


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch.fuzz")
    parser.add_argument("--seeds", default="0:200", help="BEGIN:END, or one seed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--without", default="", help=f"features that are not drawn, with commas: {', '.join(FEATURES)}")
    parser.add_argument("--only", default="", help="draw these features only")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--setting", type=int, help=f"use one environment only, 0 to {len(SETTINGS) - 1}")
    options = parser.parse_args()
    seeds = seeds_of(options.seeds)
    without, only = options.without.split(","), options.only.split(",")
    features = [name for name in FEATURES if name not in without and (name in only or not options.only)]
    settings = SETTINGS if options.setting is None else SETTINGS[options.setting:options.setting + 1]
    return report(len(seeds), fuzz(seeds, options.ranks, features, device=options.device, settings=settings, tell=print))


if __name__ == "__main__":
    sys.exit(main())
