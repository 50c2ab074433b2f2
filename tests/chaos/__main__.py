"""Every trouble for a share of the time; exit with 1 if something went wrong.

    python -m tests.chaos --minutes 20 --seed 7
    python -m tests.chaos --only "full disk" --seed 7 --round 3      # what went wrong, again
"""

from __future__ import annotations

import argparse
import itertools
import logging
import secrets
import sys
import time

from tests.chaos.floods import FLOODS
from tests.chaos.jobs import JOBS
from tests.chaos.kills import KILLS
from tests.chaos.links import LINKS
from tests.chaos.repeating import troubles
from tests.chaos.rows import Row, rounds, table
from tests.chaos.scarcity import SCARCITIES
from tests.chaos.schedules import SCHEDULES
from tests.chaos.stores import STORES
from tests.chaos.strangers import STRANGERS


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Trouble of every kind.")
    parser.add_argument("--minutes", type=float, default=60.0,
                        help="for all troubles together; what one does not need is left to those after it")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6),
                        help="of all random numbers; default: another one each time")
    parser.add_argument("--only", default="", help="troubles whose description contains this text")
    parser.add_argument("--round", type=int, help="one round of each of them")
    parser.add_argument("--results", help="a file for the table")
    options = parser.parse_args()
    logging.getLogger("hvdlite").setLevel(logging.CRITICAL)  # refusals are counted
    known = [*STRANGERS, *STORES, *JOBS, *FLOODS, *KILLS, *LINKS, *SCARCITIES, *SCHEDULES,
             *troubles(max(2.0, options.minutes * 1.5))]
    chosen = [trouble for trouble in known if options.only in trouble.what]
    total, began = sum(trouble.share for trouble in chosen), time.monotonic()
    until = began + options.minutes * 60
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    rows: list[Row] = []
    for trouble in chosen:
        numbers = itertools.count() if options.round is None else [options.round]
        row = rounds(trouble, options.seed, max(0.0, until - time.monotonic()) * trouble.share / total, numbers)
        total -= trouble.share
        rows.append(row)
        print(f"{time.monotonic() - began:6.0f} s  {row.what}: {row.tried:,} tried, {row.survived:,} survived, "
              f"{row.refused:,} refused, {len(row.wrong)} wrong", *row.wrong, sep="\n", flush=True)
    wrong = sum(len(row.wrong) for row in rows)
    report = (f"Seed {options.seed}, {(time.monotonic() - began) / 60:.0f} minutes; {wrong} went wrong.\n\n{table(rows)}\n")
    print(f"\n{report}")
    if options.results:
        with open(options.results, "w", encoding="utf-8") as file:
            file.write(report)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
