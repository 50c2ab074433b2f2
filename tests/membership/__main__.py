"""Random faults in a model of an elastic job: `python -m tests.membership --events 1000000`; exit with 1 if one fails."""

from __future__ import annotations

import argparse
import sys
import traceback

from tests.membership.model import play


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.membership")
    parser.add_argument("--events", type=int, default=1_000_000, help="events that authorities handle")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
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
