"""Programs of test_buckets.py."""

from __future__ import annotations

import gc
import hashlib
import time
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd
from hvdlite.handoff.exchanged_bucket import BucketCall, ExchangedBucket
from hvdlite.runtime import gradient_sets
from hvdlite.runtime.runtime import Runtime
from tests.torch.models import has_learned, net, share, weights, wrapped


def story(runtime: Runtime, kind: str) -> list[Any]:
    """Train in a way that meets the hazard called `kind`; return the weights after each step."""
    rank = runtime.world.rank
    model = net()
    options: Any = {"passes": {"backward_passes_per_step": 2}, "predivide": {"gradient_predivide_factor": 3.0},
               "fp16": {"compression": hvd.Compression.fp16}}.get(kind, {})
    optimizer = wrapped(runtime, model, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=kind == "scaler")
    generator = torch.Generator().manual_seed(11)
    history: list[Any] = []
    for turn in range(12):
        x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
        x, y = share(x, runtime), share(y, runtime)
        if kind == "to zero":
            optimizer.zero_grad(set_to_none=False)
        elif kind == "module":
            model.zero_grad()
        else:
            optimizer.zero_grad()
        if kind == "passes":
            torch.nn.functional.mse_loss(model(x), y).backward()
        if kind == "no_sync":
            with optimizer.no_sync():
                torch.nn.functional.mse_loss(model(x), y).backward()
        if kind == "frozen":
            model[0].weight.requires_grad_(turn % 4 != 3)
        if kind == "frozen on one":
            model[0].weight.requires_grad_(not (rank == 0 and turn % 4 == 3))
        if kind == "scaler" and turn == 5 and rank == 1:
            x = x * float("inf")  # every rank must see it and skip the step
        if kind != "idle" or (turn + rank) % 3:
            scaler.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
        if kind == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if kind == "assign":
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 0.5
        if kind == "replace data":
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data.clone()
        if kind == "double" and turn == 6:
            model.double().float()
        scaler.step(optimizer)
        scaler.update()
        if kind == "scaler" and turn == 5:
            assert all(torch.equal(*pair) for pair in zip(weights(model), history[-1], strict=True))
        history.append(weights(model))
    return history


KINDS = ["plain", "scaler", "to zero", "module", "passes", "no_sync", "frozen", "frozen on one", "idle", "clip", "assign",
         "replace data", "double", "predivide", "fp16"]


def the_only_bucket_goes_through_a_mailbox(runtime: Runtime) -> str:
    """Train, with what ends mailboxes in between; return a digest of the weights."""
    model = net()
    optimizer = wrapped(runtime, model)
    made: list[ExchangedBucket] = []
    times = []

    def exchanged(*arguments: Any) -> ExchangedBucket:
        made.append(ExchangedBucket(*arguments))
        return made[-1]

    def train(turns: int, lacks: bool = False) -> None:
        for _ in range(turns):
            optimizer.zero_grad()
            output = model[0](torch.ones(4, 6)) if lacks and runtime.world.rank else model(torch.ones(4, 6))
            (output * (1 + runtime.world.rank)).sum().backward()
            optimizer.step()
        times.append(sum(handle._call.is_done for handle in made))

    vars(gradient_sets)["ExchangedBucket"] = exchanged
    BucketCall.patience_seconds = 60.0  # whatever else the machine does
    train(12)
    assert times[-1] >= 6, "it has learned"
    train(1, lacks=True)
    runtime.barrier("before").wait()
    train(40)
    BucketCall.patience_seconds = 0.05
    if runtime.world.rank == 0:
        time.sleep(0.3)
    train(1)
    runtime.barrier("after").wait()
    BucketCall.patience_seconds = 60.0
    train(40)
    assert times[1] == times[0] and times[2] > times[1] and times[4] > times[3], times
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights(model))).hexdigest()


def the_same_bits_in_shared_memory(runtime: Runtime) -> dict[str, str]:
    """Return a digest of the weights of each kind's steps."""
    torch.set_num_threads(1)
    digests = {}
    for kind in KINDS:
        history = story(runtime, kind)
        digests[kind] = hashlib.sha256(b"".join(each.numpy().tobytes() for step in history for each in step)).hexdigest()
    return digests


def nobody_touches_a_gradient_between_backward_and_step() -> None:
    hvd.init()
    rank = hvd.rank()
    parameters = [torch.nn.Parameter(torch.zeros(100_000)) for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    for turn in range(12):
        optimizer.zero_grad(set_to_none=turn % 2 == 0)
        torch.stack([(parameter * (rank + turn)).sum() for parameter in parameters]).sum().backward()
        if rank == turn % 3:
            torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
            for parameter in parameters:
                parameter.grad.mul_(100).zero_().fill_(-1.0)
        hvd.barrier()
        for parameter in parameters:
            wanted = -1.0 if rank == turn % 3 else 1.0 + turn
            assert (parameter.grad == wanted).all(), (turn, parameter.grad[:3])
        hvd.barrier()
    assert has_learned(optimizer)


def gradients_outlive_shutdown() -> None:
    hvd.init()
    model = torch.nn.Linear(1000, 1000)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
    hvd.shutdown()
    gc.collect()
    assert (model.weight.grad == 1).all()
    model.weight.grad.mul_(2)


def optimizers_that_come_and_go_leave_no_memory_behind() -> None:
    hvd.init()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096

    for turn in range(40):
        parameter = torch.nn.Parameter(torch.zeros(1_000_000))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(4):
            optimizer.zero_grad()
            parameter.sum().backward()
        del parameter, optimizer
        gc.collect()
        if turn == 9:
            before = resident()
    assert resident() - before < 40e6, (before, resident())
