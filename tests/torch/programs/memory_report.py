"""Memory of ranks that train."""

from __future__ import annotations

import torch

import hvdlite_torch as hvd
from tests.torch.distributed.programs.ranks import begin


def train() -> tuple[list[dict[str, int]], list[dict[str, int]], str]:
    """Return the reports before training and after it."""
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.BatchNorm1d(500))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    before = hvd.memory_report(model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 1000)).sum().backward()
        optimizer.step()
    hvd.allreduce(torch.zeros(1 << 20), name="large")
    model.tied = model[0].weight  # counts once
    after = hvd.memory_report(model, optimizer)
    hvd.shutdown()
    return list(before.ranks), list(after.ranks), str(after)


def unusual(folder: str) -> list[int]:
    """Return the gradients' and the optimizer's bytes of tensors that are not plain ones."""
    from torch.distributed import device_mesh
    from torch.distributed import tensor as dtensor

    hvd.init()
    found = []
    words = torch.nn.Embedding(100, 8, sparse=True)
    words(torch.tensor([3, 3, 5])).sum().backward()
    found.append(hvd.memory_report(words).ranks[0]["gradients"])  # 3 rows of 8 floats, and 3 indices
    weight = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.LBFGS([weight], max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight ** 4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found.append(hvd.memory_report(torch.nn.Module(), optimizer).ranks[0]["optimizer"])
    compressed = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2))
    found.append(hvd.memory_report([compressed, torch.empty(9, device="meta")]).ranks[0]["parameters"])
    begin(folder)
    mesh = device_mesh.init_device_mesh("cpu", (hvd.size(),))
    shard = torch.nn.Parameter(dtensor.distribute_tensor(torch.ones(8, 3), mesh, [dtensor.Shard(0)]))
    (shard ** 2).sum().backward()
    report = hvd.memory_report([shard]).ranks[0]
    found += [report["parameters"], report["gradients"]]
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    return found
