"""Random jobs that are stopped and killed; exit with 1 if a sample is lost or counts twice.

    python -m tests.resuming --ends 200
"""

from __future__ import annotations

import argparse
import sys

from tests.resuming.campaign import campaign


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.resuming")
    parser.add_argument("--ends", type=int, default=200, help="runs to end before their job has come to its end")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    wrong = campaign(options.ends, options.first, lambda line: print(line, flush=True))
    print(f"{len(wrong)} jobs went wrong")
    for problem in wrong:
        print(f"- {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
