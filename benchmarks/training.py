"""Training on Fashion-MNIST: images/s of hvdlite, torch DDP (Gloo), Horovod, and the ceiling.

The ceiling is the same ranks training without any communication; "in step" is that with an ideal barrier between backward
and the optimizer's step, because two cores never take equally long: no exchange of gradients can be faster. "hvdlite, step"
waits for gradients in `step()`. Each contender trains its own copy of the model; the batch size is per rank. With one rank,
it shows what wrapping the optimizer costs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hvdlite_torch as hvd
from benchmarks.harness import Bench, median, say
from examples import fashion_mnist

STEPS = 10
"""Training steps per measured call."""


class Cnn(torch.nn.Module):
    """The example's network: two convolutions and two dense layers; 421,642 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
        self.head = torch.nn.Sequential(torch.nn.Linear(1600, 250), torch.nn.ReLU(), torch.nn.Linear(250, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


def mlp() -> torch.nn.Module:
    """Return the MLP 784-2048-2048-10; 5.8 million parameters."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 2048), torch.nn.ReLU(),
                               torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10))


def layers() -> torch.nn.Module:
    """Return 1,000 small layers, 2,000 parameters: what is left is the cost per gradient."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 8), *(torch.nn.Linear(8, 8) for _ in range(998)),
                               torch.nn.Linear(8, 10))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {"cnn": (Cnn, 128), "mlp": (mlp, 64),
                                                               "2000 parameters": (layers, 64)}


def trainer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor,
            batch: int, meet: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Return a function that trains `STEPS` steps on the next batches; gradients are there when it calls `meet`."""
    position = 0

    def train() -> None:
        nonlocal position
        for _ in range(STEPS):
            if position + batch > len(images):
                position = 0
            chosen = slice(position, position + batch)
            position += batch
            optimizer.zero_grad()
            functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            meet()
            optimizer.step()
    return train


def contenders(bench: Bench, build: Callable[[], torch.nn.Module], batch: int) -> dict[str, Callable[[], None]]:
    """Return what competes on one model."""
    images, labels = fashion_mnist.load(fashion_mnist.find(), "train")
    pixels = torch.from_numpy(images[hvd.rank()::hvd.size()].copy()).unsqueeze(1).float().div_(255)
    targets = torch.from_numpy(labels[hvd.rank()::hvd.size()].copy()).long()

    def made(wrap: Callable[[torch.nn.Module], tuple[torch.nn.Module, torch.optim.Optimizer]],
             meet: Callable[[], object] = lambda: None) -> Callable[[], None]:
        torch.manual_seed(0)
        model, optimizer = wrap(build())
        return trainer(model, optimizer, pixels, targets, batch, meet)

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4)

    found = {
        "ceiling": made(lambda model: (model, sgd(model))),
        "hvdlite": made(lambda model: (model, hvd.DistributedOptimizer(sgd(model), model.named_parameters()))),
    }
    if hvd.size() > 1:
        found["in step"] = made(lambda model: (model, sgd(model)), bench.ideal_barrier.meet)
        found["hvdlite, step"] = made(lambda model: (model, hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), wait_in="step")))

        def ddp(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
            return wrapped, sgd(wrapped)
        found["ddp"] = made(ddp)
    if bench.horovod is not None:
        found["horovod"] = made(lambda model: (model, bench.horovod.DistributedOptimizer(
            sgd(model), model.named_parameters())))
    return found


def main() -> None:
    bench = Bench.start(__doc__)
    rows = []
    models = dict(list(MODELS.items())[:2]) if bench.arguments.short else MODELS
    for name, (build, batch) in models.items():
        seconds = {who: median(values) for who, values in bench.interleave(contenders(bench, build, batch)).items()}
        speed = {who: STEPS * batch * hvd.size() / value for who, value in seconds.items()}
        rows.append({"model": name, "batch": batch, "images_per_second": speed})
        say(f"{name:16}" + "  ".join(f"{who} {value:9.0f}/s" for who, value in speed.items())
            + f"   of the ceiling: {speed['hvdlite'] / speed['ceiling']:.3f}"
            + "".join(f"   x{who} {speed['hvdlite'] / value:.2f}" for who, value in speed.items()
                      if who not in ("ceiling", "hvdlite")))
    bench.finish(rows)


if __name__ == "__main__":
    main()
