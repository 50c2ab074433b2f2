"""Programs of test_timeline.py."""

from __future__ import annotations

import numpy as np

import hvdlite as hvd


def a_timeline_by_knob_holds_buckets_too() -> None:
    import torch

    import hvdlite_torch as hvd

    hvd.init()
    model = torch.nn.Linear(10, 10)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
    hvd.shutdown()


def a_killed_job_leaves_all_events() -> None:
    hvd.init()
    print("ready", flush=True)
    for turn in range(1_000_000):
        hvd.allreduce(np.ones(10), name=f"x{turn % 50}")
