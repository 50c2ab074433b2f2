"""Sharded optimizer state: memory, `step()` and whole steps, beside the whole state and torch's ZeroRedundancyOptimizer.

An MLP of 22.6 million parameters with fused AdamW; the batches are small, so the optimizer is most of a step. torch's
optimizer is used with its DDP, both on the backend "hvdlite", with their buckets as views.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hvdlite_torch as hvd
from benchmarks.harness import Bench, median, say

BATCH = 16
STEPS = 4
"""Steps per round and contender."""
WARMUP = 6
WIDTH = 3072


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(784, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))


def whole(model: torch.nn.Module) -> Any:
    return model, hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True), model.named_parameters())


def sharded(model: torch.nn.Module) -> Any:
    return model, hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True), model.named_parameters(),
                                           sharded=True)


def zero(model: torch.nn.Module) -> Any:
    group = dist.new_group(backend="hvdlite")
    return (DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True),
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group,
                                    parameters_as_bucket_view=True, fused=True))


CONTENDERS: dict[str, Callable[[torch.nn.Module], Any]] = {"whole": whole, "sharded": sharded, "torch ZeRO": zero}


def resident() -> int:
    """Return the bytes of this process's memory, where what n processes share counts 1/n."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def main() -> None:
    import hvdlite_torch.distributed  # noqa: F401 - the backend
    bench = Bench.start(__doc__)
    made, memory = {}, {}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}

    def train(name: str, steps: int) -> None:
        model, optimizer = made[name]
        for _ in range(steps):
            inputs = torch.randn(BATCH, 784)
            optimizer.zero_grad()
            begun = time.perf_counter()
            model(inputs).square().mean().backward()
            ready = time.perf_counter()
            optimizer.step()
            over = time.perf_counter()
            seconds[name].append((over - ready, over - begun))

    for name, make in CONTENDERS.items():
        bench.barrier()
        before = resident()
        made[name] = make(mlp())
        train(name, WARMUP)
        bench.barrier()  # what is shared counts where it is mapped
        memory[name] = sum(hvd.allgather_object(resident() - before))
        seconds[name].clear()
    names = list(CONTENDERS)
    for turn in range(bench.arguments.rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            bench.barrier()
            train(name, STEPS)
    rows = [{"optimizer": name, "bytes": memory[name], "step_seconds": median([each for each, _ in seconds[name]]),
             "whole_seconds": median([each for _, each in seconds[name]])} for name in names]
    for row in rows:
        say(f"{row['optimizer']:12} {row['bytes'] / 2**20:7.0f} MiB on all ranks ({row['bytes'] / rows[0]['bytes']:.2f} x)  "
            f"step() {row['step_seconds'] * 1e3:6.1f} ms ({row['step_seconds'] / rows[0]['step_seconds']:.2f} x)  "
            f"whole {row['whole_seconds'] * 1e3:6.1f} ms ({row['whole_seconds'] / rows[0]['whole_seconds']:.2f} x)")
    bench.finish(rows)


if __name__ == "__main__":
    main()
