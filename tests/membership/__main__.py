"""Random faults in a model of an elastic job: `python -m tests.membership --events 1000000`; exit with 1 if one fails.

With `--depth 7`, all orders of seven events of three members instead.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from tests.membership.model import play
from tests.membership.orders import BEGINNINGS, explore


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.membership")
    parser.add_argument("--events", type=int, default=1_000_000, help="events that authorities handle")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--depth", type=int, help="go through all orders of so many events instead")
    parser.add_argument("--rare", type=int, default=0, help="of which so many are rare ones, such as another list of hosts")
    options = parser.parse_args()
    if options.depth is not None:
        for beginning in BEGINNINGS:
            print(f"{beginning.__name__}: {explore(beginning, options.depth, options.rare)} events", flush=True)
        return 0  # what fails has raised
    events, failed, seed = 0, 0, options.first
    while events < options.events and failed < 10:
        try:
            events += play(seed)
        except Exception:
            traceback.print_exc()
            print(f"seed {seed}", flush=True)
            failed += 1
        seed += 1
    print(f"{events} events in {seed - options.first} jobs; {failed} jobs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
