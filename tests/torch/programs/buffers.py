"""Programs of test_buffers.py."""

from __future__ import annotations

import io
from typing import Any

import torch

import hvdlite_torch as hvd


def buffers_are_broadcast_when_ddp_does(directory: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)

    def net(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        model.register_buffer("scale", torch.full((2,), float(seed)))
        return model

    theirs = torch.nn.parallel.DistributedDataParallel(net(rank))
    ours = net(rank)
    hvd.broadcast_parameters(ours.state_dict(), 0)
    optimizers = [torch.optim.SGD(theirs.parameters(), lr=0.1),
                  hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1))]
    handle = hvd.broadcast_buffers(ours, every_forward=True)
    generator = torch.Generator().manual_seed(10 + rank)

    def same(what: str) -> None:
        for (name, mine), other in zip(ours.named_buffers(), theirs.module.buffers(), strict=True):
            torch.testing.assert_close(mine, other, msg=f"{what}: {name} on rank {rank}")

    for step in range(4):
        if step == 2:  # something that only rank 1 does to its buffers
            for model in (ours, theirs.module):
                model.scale += rank
                model[1].running_mean = model[1].running_mean + rank  # another tensor
        x = torch.randn(5, 4, generator=generator)
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        same(f"step {step}")
        for evaluation in range(2):  # the first one is broadcast before, because gradients were on in the last forward pass
            for model in (ours, theirs):
                model.eval()
            with torch.no_grad():
                torch.testing.assert_close(ours(x), theirs(x))
            same(f"evaluation {evaluation}")
            for model in (ours, theirs.module):
                model.scale += rank
            for model in (ours, theirs):
                model.train()
    torch.save(ours, io.BytesIO())
    copied: Any = torch.optim.swa_utils.AveragedModel(ours).train()
    if rank == 0:
        copied(torch.randn(5, 4, generator=generator))
    copied.module.scale.fill_(rank)
    ours(torch.randn(5, 4, generator=generator))
    copied(torch.randn(5, 4, generator=generator))
    assert copied.module.scale.tolist() == [rank] * 2, "a copy broadcasts nothing"
    handle.remove()
    ours(torch.randn(5, 4, generator=generator))
    means = hvd.allgather(ours[1].running_mean[None])
    assert not torch.equal(means[0], means[1])
    ours._ddp_params_and_buffers_to_ignore = ["scale"]
    ours.scale.fill_(rank)
    assert hvd.broadcast_buffers(ours, root_rank=1) is None
    assert torch.equal(ours[1].running_mean, means[1]) and ours.scale.tolist() == [rank] * 2
