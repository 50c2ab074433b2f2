"""Trials of a job on three hosts, which are network namespaces of this machine: a slow link, and a frozen parameter.

The job computes as one with GPUs does: ranks sleep meanwhile, and exchange 4 MB of gradients during the backward pass.
On links of the namespaces' speed, and on slower ones up to some point, all of that is hidden behind the pass.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd
from tests.runner.networks import Hosts
from tests.torch.slowness.one_host import wrapped
from tests.torch.slowness.outcomes import NONE, OthersTime, Outcome, as_found, record
from tests.worlds import PYTHON_PATH, ROOT

CAUSES = ("link", "absent")
NAMES = "abc"
SECONDS = 5.0
BACKWARD_SECONDS = 0.03
WIDTH = 1024
STEP_BYTES = 2 * (len(NAMES) - 1) / len(NAMES) * 4 * WIDTH * WIDTH
"""What each link carries each way in a step, in a ring."""


class Computes(torch.autograd.Function):
    """The identity, whose derivative takes long and needs no core."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradient


class Model(torch.nn.Module):
    """Has the gradients of its large layer early in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(Computes.apply(self.small(x)))


def train(model: torch.nn.Module, optimizer: Any, seconds: float) -> float:
    """Train for some seconds; return the seconds of a step."""
    begun, steps = time.perf_counter(), 0
    while True:
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            steps += 1
        late = torch.tensor(float(time.perf_counter() - begun > seconds))
        if hvd.allreduce(late, op=hvd.Max, name="late"):
            return (time.perf_counter() - begun) / steps


def limits(cause: str, slow: int, extra: float, chance: random.Random) -> dict[str, float]:
    """Return the seconds that the links of hosts are to take in a step of a trial, where they are limited."""
    if cause == "link":
        return {NAMES[slow]: BACKWARD_SECONDS + extra}
    if cause == "absent":  # the exchange comes after the backward pass
        return dict.fromkeys(NAMES, extra)
    return dict.fromkeys(NAMES, 0.5 * BACKWARD_SECONDS) if chance.random() < 0.5 else {}


def ranks_program(causes: Sequence[str], controls: int, seed: int, path: Path, under: str) -> None:
    """Make a trial of each of the causes, and controls, in random order; each rank runs this."""
    hvd.init()
    rank, generator = hvd.rank(), random.Random(seed)
    torch.manual_seed(0)
    own = Model()
    model, optimizer = wrapped(under, own)
    usual = train(model, optimizer, 3.0)
    plan = [*causes, *[NONE] * controls]
    generator.shuffle(plan)
    for number, cause in enumerate(plan):
        slow, share = generator.randrange(hvd.size()), generator.uniform(0.25, 0.6 if cause == "link" else 0.4)
        seconds = limits(cause, slow, share / (1 - share) * usual, generator)
        if rank == 0:
            _order(path, {"number": number, "rates": {name: STEP_BYTES / each for name, each in seconds.items()}})
        hvd.barrier()
        others = OthersTime()
        own.large.requires_grad_(not (cause == "absent" and rank == slow))
        step = train(model, optimizer, SECONDS)
        own.large.requires_grad_(True)
        found, disturbance = hvd.slowness(SECONDS - 1.5), others.cores()
        if rank == 0:
            record(path, Outcome(cause, slow, share, step / usual - 1, disturbance, as_found(found)))
    hvd.shutdown()


def _order(path: Path, limits: dict[str, Any]) -> None:
    """Let the launcher set the limits of links, and wait until it has."""
    wanted, done = path.with_suffix(".wanted"), path.with_suffix(".done")
    wanted.with_suffix(".new").write_text(json.dumps(limits))
    wanted.with_suffix(".new").replace(wanted)
    while not done.exists() or done.read_text() != str(limits["number"]):
        time.sleep(0.02)


def run(program: list[str], path: Path) -> int:
    """Run the job, and set limits of links as it asks for; return its exit code."""
    wanted, done = path.with_suffix(".wanted"), path.with_suffix(".done")
    undo: list[Callable[[], None]] = []
    number = -1
    with tempfile.TemporaryDirectory(prefix="hvdlite-slowness-") as folder, Hosts(NAMES, Path(folder)) as network:
        placement = ",".join(f"{network.address(name)}:1" for name in NAMES)
        environment = {**network.environment(), "PYTHONPATH": PYTHON_PATH}
        with subprocess.Popen(network.hvdrun("-H", placement, *program), env=environment, cwd=ROOT) as job:
            try:
                while job.poll() is None:
                    with contextlib.suppress(FileNotFoundError):
                        order = json.loads(wanted.read_text())
                        if order["number"] != number:
                            number = order["number"]
                            while undo:
                                undo.pop()()
                            undo += [network.limit(name, f"{rate:.0f}bps", burst="256kb")
                                     for name, rate in order["rates"].items()]
                            done.write_text(str(number))
                    time.sleep(0.02)
            finally:
                job.kill()
        return job.returncode
