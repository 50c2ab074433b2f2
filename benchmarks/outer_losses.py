"""Losses of workers that train by themselves (`outer=`), beside synchronous training with as many samples and steps.

    hvdrun -np 2 python benchmarks/outer_losses.py --task cnn      Fashion-MNIST, each rank a worker
    hvdrun -np 4 python benchmarks/outer_losses.py --task gpt      a character GPT of 0.1 million parameters

Ways that send as many bytes are compared, too: rank 1 of PowerSGD, and the largest gradients (top-k), both with error
feedback. "bytes" are what a rank sends in a step over a link that it has for itself, beside those of synchronous training.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import hvdlite_torch as hvd
from examples import fashion_mnist
from examples.char_gpt import CharGPT, Text, loss_of
from hvdlite_torch import comm_hooks

SEEDS = (1, 2, 3)
INT8 = 1.004 / 4
"""Bytes of a value in 8 bits with its part of the factor, beside those in float32."""
Batch = tuple[torch.Tensor, torch.Tensor]


class CNN:
    """Fashion-MNIST, 32 samples a rank in a step; SGD with a learning rate of 0.01 and momentum 0.9."""

    def __init__(self, steps: int) -> None:
        data = fashion_mnist.find(download=False)
        self._train, self.test = (fashion_mnist.tensors(data, part).tensors for part in ("train", "test"))
        self._steps = steps

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, stride=2), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(1152, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def batches(self, seed: int) -> Iterator[Batch]:
        images, labels = self._train
        order, taken = torch.Generator().manual_seed(seed), 0
        while True:
            for indices in torch.randperm(len(images), generator=order).split(32 * hvd.size()):
                if len(indices) < 32 * hvd.size():
                    continue
                if taken == self._steps:
                    return
                own = indices.chunk(hvd.size())[hvd.rank()]
                yield images[own], labels[own]
                taken += 1

    @staticmethod
    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


class GPT:
    """Python's help texts by characters, 16 sequences a rank in a step; AdamW with a learning rate of 0.001."""

    def __init__(self, steps: int) -> None:
        self._text, self._steps = Text(), steps
        self.test = self._text.validation(256)

    def model(self) -> torch.nn.Module:
        return CharGPT(self._text.characters, width=64, layers=2)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batches(self, seed: int) -> Iterator[Batch]:
        for step in range(self._steps):
            yield self._text.batch(step + 10**6 * seed, hvd.rank(), 16)

    @staticmethod
    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return loss_of(model, *batch)


class TopK:
    """A communication hook that sends the largest elements of all gradients, and keeps the others for the next step.

    Args:
        share: of the elements that are sent, with 4 bytes for each value and 4 for its place.
    """

    def __init__(self, share: float) -> None:
        self._share, self._rest = share, torch.zeros(1)

    def reduce(self, gradients: Any, exchange: Any) -> None:
        flat = torch.cat([gradient.flatten() for _, gradient in gradients]) + self._rest
        places = flat.abs().topk(max(1, round(self._share * flat.numel()))).indices
        self._rest = flat.index_fill(0, places, 0)
        values, places = exchange.gather("values", flat[places]), exchange.gather("places", places.int())
        mean = torch.zeros_like(flat).index_add_(0, places, values / exchange.size)
        for (_, gradient), part in zip(gradients, mean.split([each.numel() for _, each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def power_sgd_share(model: torch.nn.Module) -> float:
    """Return the share of elements that rank 1 of PowerSGD sends."""
    sizes = [(len(each), each.numel()) for each in model.parameters()]
    sent = [min(rows + size // rows, size) if 2 * (rows + size // rows) <= size else size for rows, size in sizes]
    return sum(sent) / sum(size for _, size in sizes)


def ways(model: torch.nn.Module) -> dict[str, tuple[dict[str, Any], float]]:
    """Return the arguments of the optimizer, made anew for each seed, and its bytes beside those of synchronous training."""
    found: dict[str, tuple[dict[str, Any], float]] = {
        "synchronous": ({}, 1.0), "LocalSGD(10)": ({"outer": hvd.LocalSGD(10, workers="rank")}, 1 / 10)}
    for every in (10, 50, 100, 500):
        found[f"DiLoCo({every})"] = ({"outer": hvd.DiLoCo(every, workers="rank")}, INT8 / every)
        if every < 100:
            found[f"DiLoCo({every}), float32"] = ({"outer": hvd.DiLoCo(every, workers="rank", wire=None)}, 1 / every)
    found["PowerSGD(1)"] = ({"comm_hook": comm_hooks.PowerSGD}, power_sgd_share(model))
    for every in (10, 50):  # an allgather: each of the others gets 8 bytes an element; an allreduce: 8 / ranks
        share = INT8 / every / hvd.size()
        found[f"top-k, bytes of DiLoCo({every})"] = ({"comm_hook": lambda share=share: TopK(share)}, INT8 / every)
    return found


def trained(task: CNN | GPT, seed: int, arguments: dict[str, Callable[[], Any]]) -> float:
    """Return the loss on data that was not trained with; of the global weights."""
    torch.manual_seed(seed)
    model = task.model()
    made = {name: value() if name == "comm_hook" else value for name, value in arguments.items()}
    optimizer: Any = hvd.DistributedOptimizer(task.optimizer(model), model.named_parameters(), **made)
    for batch in task.batches(seed):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    if "outer" in made:
        optimizer.synchronize_outer(model)
    with torch.no_grad():
        return float(task.loss(model, task.test))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["cnn", "gpt"], default="cnn")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    task: CNN | GPT = CNN(arguments.steps) if arguments.task == "cnn" else GPT(arguments.steps)
    rows = []
    for name, (given, share) in ways(task.model()).items():
        losses = [trained(task, seed, given) for seed in SEEDS]
        rows.append({"case": name, "losses": losses, "median": statistics.median(losses), "bytes": share})
        if hvd.rank() == 0:
            print(f"{name:>28}  bytes {share:.4f}  {', '.join(f'{each:.4f}' for each in losses)}", flush=True)
    if hvd.rank() == 0 and arguments.record:
        arguments.record.write_text(json.dumps({"task": arguments.task, "ranks": hvd.size(), "steps": arguments.steps,
                                                "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
