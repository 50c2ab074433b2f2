"""Shares of batches by speed: what `MirroredStrategy(shares="auto")` costs equal ranks, and brings unequal ones.

Every contender trains its own copy of the MLP in its own scope. With `--beside`, each rank has a core of its own, and two
processes compute all the time on the last rank's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hvdlite_torch as hvd
from benchmarks.harness import Bench, median, say
from benchmarks.training import STEPS, mlp
from examples import fashion_mnist

BATCH = 128
"""Rows for each rank, of equal shares."""
LEARNING = 300
"""Batches before anything is measured: six decisions."""


def trainer(shares: str | None) -> Callable[[], None]:
    """Return a function that trains `STEPS` steps, after the shares are learned."""
    torch.manual_seed(0)
    strategy = hvd.MirroredStrategy(shares=shares)
    with strategy.scope():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    images, labels = fashion_mnist.load(fashion_mnist.find(), "train")
    pixels = torch.from_numpy(images.copy()).unsqueeze(1).float().div_(255)
    targets = torch.from_numpy(labels.copy()).long()
    loader = strategy.distribute(DataLoader(TensorDataset(pixels, targets), BATCH * hvd.size()))

    def steps() -> Iterator[None]:
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                yield

    stepping = steps()

    def train(count: int = STEPS) -> None:
        for _ in range(count):
            next(stepping)

    train(LEARNING)
    return train


def main() -> None:
    bench = Bench.start(__doc__, beside="two processes compute on the last rank's core")
    beside: list[subprocess.Popen[bytes]] = []
    if bench.arguments.beside:
        core = sorted(os.sched_getaffinity(0))[hvd.local_rank()]
        os.sched_setaffinity(0, {core})
        if hvd.rank() == hvd.size() - 1:
            beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        seconds = bench.interleave({"equal": trainer(None), "auto": trainer("auto")})
        equal, auto = (median(seconds[name]) for name in ("equal", "auto"))
        ratios = [one / other for one, other in zip(seconds["equal"], seconds["auto"], strict=True)]
        say(f"equal shares {equal / STEPS * 1e3:.2f} ms a step, auto {auto / STEPS * 1e3:.2f} ms: {equal / auto:.3f} x as "
            f"fast (by rounds: {', '.join(f'{each:.3f}' for each in ratios)})")
        bench.finish([{"beside": len(beside), "seconds_per_step": {name: median(each) / STEPS
                                                                  for name, each in seconds.items()}}])
    finally:
        for each in beside:
            each.kill()


if __name__ == "__main__":
    main()
