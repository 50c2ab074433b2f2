"""Elastic jobs: how long the others wait when a rank joins, by the size of the state that it gets.

    python -m benchmarks.elastic_joins [--megabytes 100 1000 2000] [--rounds 5] [--record FILE]

One rank trains 100 MB of parameters by `state.loop`; the rest of the state is frozen parameters. Then there is a second
slot, on the same host or (as root) on another one: a network namespace, not shaped. Recorded are the longest time between
two steps of the first rank while the second one joins, less a step; and the time from the start of the second process to its
first step. A process holds its state three times.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.elastic import FOREVER, HVDRUN, RANK, end, pids, steps_of, wait_for
from benchmarks.run import HERE, variables
from tests.runner.networks import Hosts, unavailable

LEAST = 20
"""Steps before and after."""


def join(megabytes: int, folder: Path, hosts: Hosts | None) -> tuple[float, float, float]:
    """Return the seconds that the first rank lost, those from the second process's start to its first step, and a step's."""
    first, second = ("a", "b") if hosts else ("localhost", "localhost")
    listed = folder / "hosts"
    listed.write_text(f"{first}:1\n")
    script = folder / "discover"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    flags = ["-np", "1", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script)]
    program = [sys.executable, str(RANK), str(folder), str(megabytes), str(FOREVER), "0", "join"]
    command = hosts.hvdrun(*flags, *program) if hosts else [*HVDRUN, *flags, *program]
    environment = {**variables(), **(hosts.environment() if hosts else {})}
    environment["PYTHONPATH"] = str(HERE.parent)
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, env=environment, cwd=HERE.parent, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: any(len(steps_of(folder, pid)) > LEAST for pid in pids(folder)), "steps of one rank", 180)
        founder, = pids(folder)
        before = statistics.median(_gaps(steps_of(folder, founder))[5:])
        listed.write_text(f"{first}:2\n" if first == second else f"{first}:1\n{second}:1\n")
        wait_for(lambda: len(pids(folder)) == 2, "second process", 60)
        joined, = pids(folder) - {founder}
        begun = (folder / f"pid.{joined}").stat().st_mtime + time.monotonic() - time.time()
        wait_for(lambda: len(steps_of(folder, joined)) > LEAST, "steps of two ranks", 120)
        after = statistics.median(_gaps(steps_of(folder, joined))[5:])
        lost = max(_gaps([when for when in steps_of(folder, founder) if when > begun - before]))
        return lost - max(before, after), steps_of(folder, joined)[0] - begun, before
    finally:
        end(job)


def _gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


@contextlib.contextmanager
def _hosts(several: bool) -> Iterator[Hosts | None]:
    if not several:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as name, Hosts("ab", Path(name)) as hosts:
        yield hosts


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic_joins", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for several in (False, True):
        if several and unavailable():
            print(f"no second host: {unavailable()}")
            continue
        for megabytes in options.megabytes:
            found = []
            for _ in range(options.rounds):
                with tempfile.TemporaryDirectory(prefix="bench-") as name, _hosts(several) as hosts:
                    found.append(join(megabytes, Path(name), hosts))
            lost, started, step = ([each[index] for each in found] for index in range(3))
            rows.append({"hosts": 1 + several, "megabytes": megabytes, "lost": sorted(lost), "started": sorted(started),
                         "step": statistics.median(step)})
            print(f"{megabytes} MB, {1 + several} host{'s' * several}: the others wait {statistics.median(lost):.2f} s "
                  f"({min(lost):.2f} to {max(lost):.2f}, {len(lost)} joins); the new process steps "
                  f"{statistics.median(started):.1f} s after its start; a step takes "
                  f"{statistics.median(step) * 1000:.0f} ms", flush=True)
    if options.record:
        options.record.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
