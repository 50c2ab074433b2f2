"""What the ledgers cost that tell why a job is slow (docs/when-it-hangs.md#slow-ranks): training steps with and without.

    hvdrun -np 2 python -m benchmarks.ledger

The same model, optimizer and loader train in turns, with the ledger's calls and with functions that do nothing in their
place. Beside the ratio of these steps stands the CPU time of the calls themselves, which a busy machine changes less.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, dataloader

import hvdlite_torch as hvd
from benchmarks.harness import Bench, median, say
from benchmarks.training import Cnn
from hvdlite.diagnostics.progress import Progress, Schedule
from hvdlite.diagnostics.tcp_traffic import TcpTraffic

STEPS = 10
"""Training steps per measured call."""
CALLS = 20_000
"""Calls whose CPU time is averaged."""
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "cnn": (Cnn, 128),
    "small": (lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.Linear(64, 10)), 16)}


@contextlib.contextmanager
def no_ledger() -> Iterator[None]:
    """Count nothing meanwhile."""
    def nothing(*arguments: Any) -> float:
        return 0.0

    counted = dataloader._BaseDataLoaderIter.__next__
    callbacks, gc.callbacks[:] = list(gc.callbacks), []
    with (mock.patch.multiple(Progress, block=nothing, unblock=nothing, round=nothing, loaded=nothing, absent=nothing),
          mock.patch.object(dataloader._BaseDataLoaderIter, "__next__", counted.__wrapped__)):
        yield
    gc.callbacks[:] = callbacks


def trainer(build: Callable[[], torch.nn.Module], batch: int) -> Callable[[], None]:
    """Return a function that trains `STEPS` steps."""
    torch.manual_seed(0)
    model = build()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model.named_parameters())
    data = TensorDataset(torch.randn(8 * batch, 1, 28, 28), torch.randint(10, (8 * batch,)))
    batches = _endless(DataLoader(data, batch_size=None, sampler=torch.arange(8 * batch).view(8, batch).tolist()))

    def train() -> None:
        for _ in range(STEPS):
            images, labels = next(batches)
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return train


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def cpu_seconds(work: Callable[[], object], calls: int) -> float:
    """Return the CPU time of a call."""
    begun = time.thread_time()
    for _ in range(calls):
        work()
    return (time.thread_time() - begun) / calls


def calls_seconds() -> dict[str, float]:
    """Return the CPU time of what is called for each wait, step and batch, and of what is read once a second."""
    progress, schedule = Progress(), Schedule()
    empty = iter(DataLoader(_Nothing(), batch_size=None, sampler=range(2 * CALLS + 10)))
    with_ledger = cpu_seconds(lambda: next(empty), CALLS)
    with no_ledger():
        without = cpu_seconds(lambda: next(empty), CALLS)
    return {"a wait": cpu_seconds(lambda: progress.unblock(progress.block()), CALLS),
            "a step": cpu_seconds(progress.round, CALLS), "a batch of torch's loader": max(0.0, with_ledger - without),
            "once a second, the kernel's times": cpu_seconds(schedule.read, CALLS // 100),
            "once a second, connections (several hosts)": cpu_seconds(lambda: TcpTraffic().read(), CALLS // 100)}


class _Nothing(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def main() -> None:
    bench = Bench.start(__doc__)
    rows: list[dict[str, Any]] = []
    for name, (build, batch) in MODELS.items() if not bench.arguments.short else [("small", MODELS["small"])]:
        train = trainer(build, batch)

        def without(train: Callable[[], None] = train) -> None:
            with no_ledger():
                train()
        seconds = bench.interleave({"with": train, "without": without})
        ratios = sorted(one / other for one, other in zip(seconds["with"], seconds["without"], strict=True))
        step = median(seconds["without"]) / STEPS
        rows.append({"model": name, "step": step, "ratio": median(ratios), "ratios": ratios})
        say(f"{name}: a step takes {step * 1e3:.2f} ms; with the ledger {median(ratios):.4f} of that (median of "
            f"{len(ratios)} rounds, quartiles {ratios[len(ratios) // 4]:.4f} and {ratios[-1 - len(ratios) // 4]:.4f})")
    rows += [{"call": call, "cpu_seconds": used} for call, used in calls_seconds().items()]
    say("CPU time, us: " + ", ".join(f"{row['call']} {row['cpu_seconds'] * 1e6:.2f}" for row in rows if "call" in row))
    bench.finish(rows)


if __name__ == "__main__":
    main()
