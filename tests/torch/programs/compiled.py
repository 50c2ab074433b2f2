"""A training step that is compiled as a whole: the compiler leaves our hooks to Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hvdlite_torch as hvd


def _trained(wrap: Callable[[Any], Any], mean: Callable[[torch.Tensor], torch.Tensor],
             factors: list[float]) -> tuple[list[torch.Tensor], int]:
    """Return the parameters and losses after some compiled steps, and how many frames were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return mean(loss.detach())

    losses = [step(torch.cat([torch.full((4, 8), factor * (turn + 1)) for factor in factors])) for turn in range(5)]
    frames = torch._dynamo.utils.counters["frames"]["total"]
    return [*(parameter.detach() for parameter in model.parameters()), *losses], frames


def _frames(call: Callable[[], Any]) -> int:
    """Return how many frames the compiler looks at when a function is called."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(call, backend="eager")()
    return torch._dynamo.utils.counters["frames"]["total"]


def _differentiated() -> None:
    values = torch.ones(3, requires_grad=True)
    hvd.allreduce(values * 2).sum().backward()


def a_compiled_step_is_as_in_one_process() -> None:
    torch.set_num_threads(1)
    hvd.init()
    found, frames = _trained(hvd.DistributedOptimizer, hvd.allreduce, [0.1 * (hvd.rank() + 1)])
    expected, plain = _trained(lambda optimizer: optimizer, lambda loss: loss, [0.1, 0.2])
    torch.testing.assert_close(found, expected)
    assert 0 < frames < plain + 5, f"{frames} frames were compiled, {plain} with a plain optimizer"
    layer, rows = hvd.SyncBatchNorm(4), torch.rand(4, 4)
    for call, most in ((hvd.barrier, 3), (_differentiated, 6), (lambda: layer(rows), 30)):  # torch's own layers are many
        assert _frames(call) <= most, call
    hvd.shutdown()
