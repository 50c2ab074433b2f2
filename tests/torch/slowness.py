"""Does `hvd.slowness()` find the slow rank, and why? Trials with a cause, and trials without one.

    python -m tests.torch.slowness --trials 100 --controls 20

A job of two ranks, each on a core of its own, trains all the time. In a trial one of them is made slow in one way, by a
random amount; after some seconds `slowness` has to name this rank and the cause. It is a command of its own: it takes ten
minutes, and needs two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

import hvdlite_torch as hvd

CAUSES = ("input", "cpu", "collection", "waiting", "computing", "absent")
SECONDS = 5.0
BURN = "while True: pass"


class Situation:
    """What is done to a rank in each step of a trial."""

    def __init__(self, cause: str, share: float, step: float) -> None:
        self.cause, self.extra = cause, share / (1 - share) * step  # seconds
        self._debt = 0.0  # of collections: one takes longer than a step

    def in_input(self) -> None:
        if self.cause == "input":
            time.sleep(self.extra)

    def in_step(self) -> None:
        begun = time.perf_counter()
        if self.cause == "waiting":
            time.sleep(self.extra)
        elif self.cause == "computing":
            while time.perf_counter() - begun < self.extra:
                torch.mm(_MATRIX, _MATRIX)
        elif self.cause == "collection":
            self._debt += self.extra
            if self._debt > 0:
                gc.collect()
                self._debt -= time.perf_counter() - begun


_MATRIX = torch.ones(128, 128)


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Random samples."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), float(index % 7))


@contextlib.contextmanager
def hog(core: int, on: bool) -> Iterator[None]:
    """Let another process compute on a core."""
    if not on:
        yield
        return
    with subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", BURN]) as process:
        try:
            yield
        finally:
            process.kill()


def train(model: torch.nn.Module, optimizer: Any, batches: Iterator[torch.Tensor], situation: Situation | None,
          seconds: float) -> float:
    """Train for some seconds; return the seconds of a step."""
    begun, steps = time.perf_counter(), 0
    while True:
        for _ in range(10):
            batch = next(batches)
            if situation is not None:
                situation.in_step()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            steps += 1
        late = torch.tensor(float(time.perf_counter() - begun > seconds))
        if hvd.allreduce(late, op=hvd.Max, name="late"):
            return (time.perf_counter() - begun) / steps


def ranks_program(trials: int, controls: int, seed: int) -> None:
    """What each rank runs."""
    hvd.init()
    rank, generator = hvd.rank(), random.Random(seed)
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    os.sched_setaffinity(0, {core})
    torch.manual_seed(0)
    current: list[Situation | None] = [None]

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        if current[0] is not None:
            current[0].in_input()
        return torch.stack(samples)

    class Unused(torch.nn.Module):
        """Has a large parameter without which the output is the same; a rank that leaves it out computes as long."""

        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(24)])
            self.large, self.uses = torch.nn.Parameter(torch.zeros(1 << 22)), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.uses:
                torch.empty_like(self.large).fill_(self.large.detach().sum())
            return self.body(x) + self.large.sum() if self.uses else self.body(x)

    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(16)])
    large = Unused()
    make = lambda module: hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=1e-6))  # noqa: E731
    optimizer, other = make(model), make(large)
    loader = torch.utils.data.DataLoader(Data(), batch_size=64, sampler=range(1 << 30), collate_fn=collate)
    batches = iter(loader)
    step = train(model, optimizer, batches, None, 3.0)
    plan = [generator.choice(CAUSES) for _ in range(trials)] + ["none"] * controls
    generator.shuffle(plan)
    counts: Counter[str] = Counter()
    for number, cause in enumerate(plan):
        slow, share = generator.randrange(hvd.size()), generator.uniform(0.25, 0.6)
        if cause == "absent":
            large.uses = rank != slow
            train(large, other, batches, None, SECONDS)
        else:
            current[0] = Situation(cause, share, step) if rank == slow and cause not in ("none", "cpu") else None
            with hog(core, rank == slow and cause == "cpu"):
                train(model, optimizer, batches, current[0], SECONDS)
            current[0] = None
        found = hvd.slowness(SECONDS - 1.5)
        if rank == 0:
            right_rank = (found is None) if cause == "none" else found is not None and found.rank == slow
            right_cause = right_rank and (found is None or found.cause == cause)
            counts.update({"control" if cause == "none" else "trial": 1, "rank": right_rank and cause != "none",
                           "cause": right_cause and cause != "none", "alarm": cause == "none" and found is not None})
            if not right_cause:
                told = None if found is None else found.as_dict()
                print(f"trial {number}: {cause} on rank {slow} ({share:.0%}): {told}", flush=True)
    if rank == 0:
        print(f"{counts['trial']} trials: rank right {counts['rank']}, cause right {counts['cause']}; {counts['control']} "
              f"controls: {counts['alarm']} false alarms", flush=True)
    hvd.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--controls", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        torch.set_num_threads(1)
        ranks_program(options.trials, options.controls, options.seed)
        return 0
    program = [sys.executable, "-m", "tests.torch.slowness", "--rank", *sys.argv[1:]]
    return subprocess.run([sys.executable, "-m", "hvdlite_runner", "-np", "2", *program], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
