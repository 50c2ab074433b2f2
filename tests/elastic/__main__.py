"""Random failures, or all failpoints; exit with 1 if something was wrong.

    python -m tests.elastic --kills 200
    python -m tests.elastic --outer --kills 100
    python -m tests.elastic --points [--only TEXT] [--from NUMBER]

Failpoints have numbers, and no random choices. To continue a run, give `--from` the next number.
"""

from __future__ import annotations

import argparse
import sys

from tests.elastic import outer
from tests.elastic.campaign import campaign, points


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.elastic")
    parser.add_argument("--kills", type=int, default=200, help="members and hosts to lose")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--points", action="store_true", help="run all failpoints instead")
    parser.add_argument("--outer", action="store_true", help="train with outer=")
    parser.add_argument("--only", default="", help="those whose description contains this text")
    parser.add_argument("--from", type=int, default=1, dest="number", help="the number of the first failpoint")
    options = parser.parse_args()

    def tell(line: str) -> None:
        print(line, flush=True)

    lose = outer.campaign if options.outer else campaign
    wrong = points(options.only, options.number, tell) if options.points else lose(options.kills, options.first, tell)
    print(f"{len(wrong)} jobs went wrong")
    for problem in wrong:
        print(f"- {problem.splitlines()[0]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
