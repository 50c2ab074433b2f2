"""Random kills: `python -m tests.elastic --kills 200`; exit with 1 if something was wrong."""

from __future__ import annotations

import argparse
import sys

from tests.elastic.campaign import campaign


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.elastic")
    parser.add_argument("--kills", type=int, default=200, help="members to kill")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    wrong = campaign(options.kills, options.first, lambda line: print(line, flush=True))
    print(f"{len(wrong)} jobs went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
