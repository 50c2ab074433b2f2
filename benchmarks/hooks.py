"""Communication hooks and compression: ms of a training step, beside DDP (Gloo) with the hooks of torch.

Each contender trains its own copy of the model on random images. "plain" is without any hook; "alone" is the same ranks
without any communication. DDP's PowerSGD begins in its third step, ours at once. It gets one bucket: with several, torch's
hook calls collectives from threads of Gloo in an order that differs between ranks, and the job aborts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hvdlite_torch as hvd
from benchmarks.harness import Bench, median, say
from benchmarks.training import MODELS
from hvdlite_torch import comm_hooks

STEPS = 5
"""Training steps per measured call."""
OURS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "compression fp16": lambda: {"compression": hvd.Compression.fp16},
    "powersgd 1": lambda: {"comm_hook": comm_hooks.PowerSGD(1, start_iter=0)},
}
DDP: dict[str, Callable[[], tuple[Any, Callable[..., Any]] | None]] = {
    "ddp, plain": lambda: None,
    "ddp, cast fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "ddp, powersgd 1": lambda: (powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
}


def trainer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Callable[[], None]:
    """Return a function that trains `STEPS` steps."""
    images, labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return train


def contenders(build: Callable[[], torch.nn.Module], batch: int) -> dict[str, Callable[[], None]]:
    """Return what competes on one model."""
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = build()
        return model, torch.optim.SGD(model.parameters(), lr=1e-4)
    found = {"alone": trainer(*made(), batch)}
    for name, arguments in OURS.items():
        model, optimizer = made()
        found[name] = trainer(model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments()), batch)
    for name, hook in DDP.items() if hvd.size() > 1 else ():
        model, optimizer = made()
        registered = hook()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True,
                                          bucket_cap_mb=1000 if "powersgd" in name else None)
        if registered is not None:
            wrapped.register_comm_hook(*registered)
        found[name] = trainer(wrapped, optimizer, batch)
    return found


def main() -> None:
    bench = Bench.start(__doc__)
    rows = []
    for name, (build, batch) in MODELS.items() if not bench.arguments.short else [("mlp", MODELS["mlp"])]:
        seconds = {who: median(values) / STEPS
                   for who, values in bench.interleave(contenders(build, batch), warmup=2).items()}
        rows.append({"model": name, "batch": batch, "seconds": seconds})
        say(f"{name}, ms a step: " + "  ".join(f"{who} {value * 1e3:.2f}" for who, value in seconds.items()))
    bench.finish(rows)


if __name__ == "__main__":
    main()
