"""Print each failing seed with what was drawn; exit with 1 if there is one. See the package."""

from __future__ import annotations

import argparse
import itertools
import sys

from tests.fuzzing import report, seeds_of
from tests.tf.fuzz.draws import BACKENDS, SHARES
from tests.tf.fuzz.jobs import fuzz


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.tf.fuzz")
    parser.add_argument("--seeds", default="0:1000", help="BEGIN:END, or one seed; dealt out to the backends")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="run all seeds on this backend")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    seeds = seeds_of(options.seeds)
    parts = ((seeds if options.backend else seeds[:round(len(seeds) * SHARES[backend])], backend)
             for backend in options.backend or BACKENDS)
    return report(len(seeds), itertools.chain.from_iterable(
        fuzz(part, backend, device=options.device, tell=print) for part, backend in parts))


if __name__ == "__main__":
    sys.exit(main())
