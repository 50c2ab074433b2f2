"""A training step over N parameters of 64 values, where a gradient costs more in calls than in bytes.

The ceiling is the same ranks without any communication; the step is `zero_grad`, a forward pass that only sums, `backward`
and SGD. What is above the ceiling, divided by N, is the cost of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

import hvdlite_torch as hvd
from benchmarks.harness import Bench, median, say

COUNTS = {"1000 of 64": (1000, (64,)), "1000 of 8 x 8": (1000, (8, 8))}


class Sums(torch.nn.Module):
    """N parameters of one shape."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.values = torch.nn.ParameterList(torch.zeros(shape) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return torch.stack([value.sum() for value in self.values]).sum()


def contenders(bench: Bench, count: int, shape: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    """Return what competes: functions that make one step."""
    def stepper(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        return step

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    ceiling, ours, theirs, horovods = (Sums(count, shape) for _ in range(4))
    found = {"hvdlite": stepper(ours, hvd.DistributedOptimizer(sgd(ours), ours.named_parameters())),
             "ceiling": stepper(ceiling, sgd(ceiling))}
    if hvd.size() > 1:
        found["ddp"] = stepper(DistributedDataParallel(theirs, gradient_as_bucket_view=True), sgd(theirs))
    if bench.horovod is not None:
        found["horovod"] = stepper(horovods, bench.horovod.DistributedOptimizer(sgd(horovods), horovods.named_parameters()))
    return found


def main() -> None:
    bench = Bench.start(__doc__)
    rows = []
    for case, (count, shape) in (list(COUNTS.items())[:1] if bench.arguments.short else COUNTS.items()):
        seconds = {name: median(values) for name, values in
                   bench.interleave(contenders(bench, count, shape), warmup=6).items()}
        rows.append({"case": case, "seconds": seconds})
        say(f"{case:14}" + "  ".join(f"{name} {value * 1e3:6.2f} ms" for name, value in seconds.items())
            + f"   above the ceiling: {(seconds['hvdlite'] - seconds['ceiling']) / count * 1e6:.1f} us a gradient"
            + "".join(f"   x{name} {seconds['hvdlite'] / seconds[name]:.2f}" for name in seconds if name != "hvdlite"))
    bench.finish(rows)


if __name__ == "__main__":
    main()
