"""Programs of test_beside_torch.py."""

from __future__ import annotations

from typing import Any

import torch

import hvdlite_torch as hvd


def compiled_models_and_steps_train_like_plain_ones() -> None:
    hvd.init()
    torch.set_num_threads(1)

    def run(compiles: bool, step_too: bool = False, wait_in: str = "backward", passes: int = 1) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(),
                                             wait_in=wait_in)
        forward = torch.compile(model, backend="aot_eager") if compiles else model
        step = torch.compile(optimizer.step, backend="aot_eager") if step_too else optimizer.step
        torch.manual_seed(hvd.rank() + 1)
        for _ in range(6):
            optimizer.zero_grad()
            for _ in range(passes):
                forward(torch.randn(8, 6)).square().mean().backward()
            step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = run(False)
    for compiled in (run(True), run(True, step_too=True), run(True, True, "step")):
        for mine, theirs in zip(compiled, plain, strict=True):
            torch.testing.assert_close(mine, theirs)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for mine, theirs in zip(run(True, wait_in="step", passes=2), run(False, passes=2), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for gradients that are not final"
