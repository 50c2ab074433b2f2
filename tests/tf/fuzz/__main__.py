"""Print each failing seed with what was drawn; exit with 1 if there is one. See the package."""

from __future__ import annotations

import argparse
import sys
import time

from tests.tf.fuzz.draws import BACKENDS, SHARES
from tests.tf.fuzz.jobs import fuzz


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.tf.fuzz")
    parser.add_argument("--seeds", default="0:1000", help="BEGIN:END, or one seed; dealt out to the backends")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="run all seeds on this backend")
    options = parser.parse_args()
    begin, _, end = options.seeds.partition(":")
    seeds = range(int(begin), int(end) if end else int(begin) + 1)
    begun, failures = time.monotonic(), 0
    for backend in options.backend or BACKENDS:
        part = seeds if options.backend else seeds[:round(len(seeds) * SHARES[backend])]
        for failure in fuzz(part, backend, tell=print):
            print(failure, flush=True)
            failures += 1
    print(f"{len(seeds)} seeds in {time.monotonic() - begun:.0f} s: {failures} failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
