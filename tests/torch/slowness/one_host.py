"""Trials of a job of two ranks on one host, each on its own core: what a rank does by itself, or others do to its core.

The job trains with a `DistributedOptimizer`, or under what builds on `torch.distributed`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd
from tests.torch.slowness.outcomes import NONE, OthersTime, Outcome, as_found, record

CAUSES = ("input", "cpu", "collection", "waiting", "computing")
SECONDS = 5.0
BURN = "while True: pass"


class Situation:
    """What is done to a rank in each step of a trial."""

    def __init__(self, cause: str, share: float, step: float) -> None:
        self.cause, self.extra = cause, share / (1 - share) * step  # seconds
        self._debt = 0.0  # of collections: one takes longer than a step

    def in_input(self) -> None:
        """Be slow while a batch is loaded."""
        if self.cause == "input":
            time.sleep(self.extra)

    def in_step(self) -> None:
        """Be slow in the step itself."""
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


def wrapped(under: str, model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """Return a model and its optimizer as a script uses them."""
    if under == "optimizer":
        return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model.named_parameters())
    torch.distributed.init_process_group("hvdlite")
    if under == "accelerate":
        from accelerate import Accelerator
        prepared: tuple[torch.nn.Module, Any] = Accelerator(cpu=True).prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-6))
        return prepared
    if under == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (hvd.size(),))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


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


def ranks_program(causes: Sequence[str], controls: int, seed: int, path: Path, under: str) -> None:
    """Make a trial of each of the causes, and controls, in random order; each rank runs this."""
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

    blocks = [torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]) for _ in range(4)]  # as FSDP2 shards them
    model: torch.nn.Module = torch.nn.Sequential(*blocks)
    model, optimizer = wrapped(under, model)
    batches = iter(torch.utils.data.DataLoader(Data(), batch_size=64, sampler=range(1 << 30), collate_fn=collate))
    usual = train(model, optimizer, batches, None, 3.0)
    plan = [*causes, *[NONE] * controls]
    generator.shuffle(plan)
    for cause in plan:
        slow, share = generator.randrange(hvd.size()), generator.uniform(0.25, 0.6)
        others = OthersTime()
        current[0] = Situation(cause, share, usual) if rank == slow and cause not in (NONE, "cpu") else None
        with hog(core, rank == slow and cause == "cpu"):
            step = train(model, optimizer, batches, current[0], SECONDS)
        current[0] = None
        found, disturbance = hvd.slowness(SECONDS - 1.5), others.cores()
        if rank == 0:
            record(path, Outcome(cause, slow, share, step / usual - 1, disturbance, as_found(found)))
    hvd.shutdown()
