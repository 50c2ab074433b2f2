"""Latency of one blocking allreduce of a private float32 tensor, call by call: hvdlite and torch.distributed (Gloo).

Every call is timed. The contenders take turns after a few calls each, so that both meet the same moments of a noisy machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import hvdlite_torch as hvd
from benchmarks import hogs
from benchmarks.harness import Bench, say

SIZES = [4, 64, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
SHORT = [4, 64 << 10]
CALLS = 25
"""How many calls a contender makes in a turn; the first, which may find the other's traces, is not counted."""

HOGS = 2
"""CPU hogs beside the ranks in the rows of a busy machine."""


def contenders(nbytes: int) -> dict[str, Callable[[], object]]:
    """Return what competes; each works on its own tensor."""
    ours, theirs = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    return {"hvdlite": lambda: hvd.allreduce_(ours, op=hvd.Sum, name="x"), "gloo": lambda: dist.all_reduce(theirs)}


def calls(bench: Bench, found: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of every call on this rank."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    names, clock = list(found), time.perf_counter
    for turn in range(bench.arguments.rounds * 4):
        for name in names if turn % 2 else reversed(names):
            work = found[name]
            bench.barrier()
            work()
            for _ in range(CALLS):
                begun = clock()
                work()
                seconds[name].append(clock() - begun)
    return seconds


def main() -> None:
    bench = Bench.start(__doc__)
    rows = []
    for count in (0, HOGS):
        started = hogs.start(count) if hvd.local_rank() == 0 else []
        for nbytes in SHORT if bench.arguments.short else SIZES:
            found = calls(bench, contenders(nbytes))
            figures = {name: {"median": statistics.median(values), "p99": statistics.quantiles(values, n=100)[98],
                              "mean": statistics.fmean(values)} for name, values in found.items()}
            rows.append({"bytes": nbytes, "hogs": count, "seconds": figures})
            ours, theirs = figures["hvdlite"], figures["gloo"]
            say(f"{count} hogs {nbytes:>6} B" + "".join(
                f"   {kind} {ours[kind] * 1e6:7.0f} / {theirs[kind] * 1e6:7.0f} us = {ours[kind] / theirs[kind]:4.2f}"
                for kind in ("median", "mean", "p99")))
        hogs.stop(started)
    bench.finish(rows)


if __name__ == "__main__":
    main()
