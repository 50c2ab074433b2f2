"""Elastic jobs: how long a death takes, and what elasticity costs while nobody dies.

    python -m benchmarks.elastic                recovery of 4 ranks with 100 MB of parameters, beside torchrun's restart
    python -m benchmarks.elastic --overhead     steps per second: an elastic job and a plain one; with commits and without;
                                                `state.loop` and a DataLoader with DistributedSampler

The time of a death runs from SIGKILL to the end of the first step that all survivors (torchrun: all new processes) complete
afterwards, less one step of undisturbed training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.elastic_rank import TURN
from benchmarks.run import HERE, variables

RANK = HERE / "elastic_rank.py"
HVDRUN = [sys.executable, "-m", "hvdlite_runner.cli"]
FOREVER = 10**6
"""Steps of a job that is killed."""


def steps_of(folder: Path, pid: int) -> list[float]:
    """Return when a process completed its steps, in seconds of the monotonic clock."""
    try:
        content = (folder / f"steps.{pid}").read_bytes()
    except FileNotFoundError:
        return []
    return [when for when, in struct.iter_unpack("d", content[:len(content) // 8 * 8])]


def pids(folder: Path) -> set[int]:
    """Return the process ids of all ranks that have begun."""
    return {int(path.suffix[1:]) for path in folder.glob("pid.*")}


def command(kind: str, ranks: int, folder: Path, megabytes: int, steps: int, every: int) -> list[str]:
    """Return the command of a job: "elastic", "turns", "plain" or "torchrun"."""
    last = [str(RANK), str(folder), str(megabytes), str(steps), str(every)]
    if kind == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                "--max-restarts=3", *last, "ddp"]
    if kind == "plain":
        return [*HVDRUN, "-np", str(ranks), sys.executable, *last, kind]
    if kind in ("loop", "told to leave"):
        last[-1:] = [str(every), "loop"]
        return [*HVDRUN, "-np", str(ranks), "--min-np", "1", "--blacklist-for-good", sys.executable, *last]
    if kind in ("loops", "saving"):
        return [*HVDRUN, "-np", str(ranks), "--min-np", "1", sys.executable, *last, kind]
    return [*HVDRUN, "-np", str(ranks), "--min-np", "1", "--blacklist-for-good", sys.executable, *last,
            "turns" if kind == "turns" else "hvdlite"]


def wait_for(condition: object, what: str, seconds: float = 120.0) -> None:
    """Block until `condition()`."""
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"no {what} within {seconds} s")
        time.sleep(0.01)


def recovery(kind: str, ranks: int, megabytes: int, victim_rank: int) -> tuple[float, float]:
    """Kill a rank of a job; return the seconds of its recovery less a step, and those of a step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = subprocess.Popen(command(kind, ranks, folder, megabytes, FOREVER, 10), env=variables(), cwd=HERE.parent,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            wait_for(lambda: len(pids(folder)) == ranks and all(len(steps_of(folder, pid)) > 30 for pid in pids(folder)),
                     "30 steps")
            everybody = pids(folder)
            a_step = statistics.median(after - before for pid in everybody for before, after in
                                       zip(steps_of(folder, pid)[10:], steps_of(folder, pid)[11:], strict=False))
            time.sleep(random.random() * 10 * a_step)
            victim = sorted(everybody)[victim_rank]
            killed = time.monotonic()
            os.kill(victim, signal.SIGTERM if kind == "told to leave" else signal.SIGKILL)

            def first_steps() -> list[float]:
                expected = pids(folder) - everybody if kind == "torchrun" else everybody - {victim}
                firsts = [next((when for when in steps_of(folder, pid) if when > killed + a_step), None) for pid in expected]
                return [] if len(firsts) < ranks - (kind != "torchrun") or None in firsts else [w for w in firsts if w]

            wait_for(first_steps, "step after a death")
            return max(first_steps()) - killed - a_step, a_step
        finally:
            end(job)


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job and all processes of its session."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def undisturbed(kind: str, ranks: int, megabytes: int, steps: int, every: int) -> list[float]:
    """Return when a rank completed its steps, after the first turn, in a job in which nobody dies."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(command(kind, ranks, folder, megabytes, steps, every), env=variables(), cwd=HERE.parent, check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return steps_of(folder, min(pids(folder)))


def rate(times: list[float]) -> float:
    """Return steps per second."""
    return (len(times) - 1) / (times[-1] - times[0])


def share_of_turns(ends: list[float], first: int = 2) -> list[float]:
    """Return the rates of every other turn, each as a share of the mean rate of the turns before and after it.

    Args:
        ends: of turns.
        first: the first turn to be compared; its rate is that between the ends `first` and `first` + 1.
    """
    rates = [1 / (after - before) for before, after in itertools.pairwise(ends)]
    return [2 * rates[turn] / (rates[turn - 1] + rates[turn + 1]) for turn in range(first, len(rates) - 1, 2)]


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    if options.overhead:
        rates: dict[str, list[float]] = {"plain": [], "elastic": []}
        shares: dict[str, list[float]] = {"turns": [], "loops": [], "saving": []}
        for _ in range(options.rounds):
            for kind, each in rates.items():
                times = undisturbed(kind, options.ranks, options.megabytes, options.steps, 0)
                each.append(rate(times[TURN - 1:]))
            for kind, each in shares.items():
                times = undisturbed(kind, options.ranks, options.megabytes, options.steps, 10)
                each += share_of_turns(times[TURN - 1::TURN]) if kind == "turns" else share_of_turns(times)
        found_by = {"elastic, of plain": list(map(operator.truediv, rates["elastic"], rates["plain"])),
                    "commits every 10 steps, of none": shares["turns"],
                    "state.loop, of a plain loop": shares["loops"],
                    "state.loop with a checkpoint a minute, of a plain loop": shares["saving"]}
        for what, found in ((what, sorted(each)) for what, each in found_by.items()):
            middle, mean = statistics.median(found), statistics.fmean(found)
            rows.append({"what": what, "median": middle, "mean": mean, "ratios": found})
            print(f"{what}: median {middle:.3f}, mean {mean:.3f} ({found[0]:.3f} to {found[-1]:.3f}, {len(found)} ratios)",
                  flush=True)
    else:
        for kind in ("elastic", "loop", "told to leave", "torchrun"):
            found = [recovery(kind, options.ranks, options.megabytes, index % options.ranks)
                     for index in range(options.rounds if kind != "torchrun" else min(3, options.rounds))]
            times = sorted(seconds for seconds, _ in found)
            rows.append({"kind": kind, "median": statistics.median(times), "longest": times[-1], "deaths": len(times),
                         "step": statistics.median(step for _, step in found), "seconds": times})
            print(f"{kind}: {len(times)} deaths, median {statistics.median(times):.2f} s, longest {times[-1]:.2f} s "
                  f"(a step takes {statistics.median(step for _, step in found) * 1000:.0f} ms)", flush=True)
            _record(options, rows)  # now, because torchrun's jobs may not come back
    _record(options, rows)


def _record(options: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    if options.record:
        options.record.write_text(json.dumps({"ranks": options.ranks, "megabytes": options.megabytes, "rows": rows},
                                             indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
