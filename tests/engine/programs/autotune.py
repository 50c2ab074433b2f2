"""Programs of test_autotune.py."""

from __future__ import annotations


def training_goes_on_with_equal_replicas_while_settings_change() -> None:
    import torch

    import hvdlite_torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(8)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    torch.manual_seed(hvd.rank())
    for _ in range(90):
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
