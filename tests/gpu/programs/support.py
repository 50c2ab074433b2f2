"""What programs of ranks on GPUs have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

import hvdlite_torch as hvd


def begin(shared_gpu: bool = True) -> tuple[int, int, torch.device]:
    """Start this rank; return which it is, how many there are, and its GPU.

    Args:
        shared_gpu: whether it is allowed that ranks share a GPU.
    """
    if torch.cuda.device_count() < int(os.environ["HVDLITE_SIZE"]):
        # Several ranks on one GPU: NCCL takes each for a host of its own, and speaks TCP over the loopback interface.
        os.environ.update(NCCL_HOSTID=f"r{os.environ['HVDLITE_RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1",
                          NCCL_ALGO="Ring", NCCL_PROTO="Simple", NCCL_MAX_CTAS="2", HVDLITE_SHARED_GPU=str(int(shared_gpu)))
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return hvd.rank(), hvd.size(), torch.device("cuda", torch.cuda.current_device())


def net(seed: int = 3, wide: int = 64) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, track_running_stats=False),
                                torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, wide), torch.nn.Tanh(),
                                torch.nn.Linear(wide, 5))
    return model.cuda()


def batches(steps: int, size: int, each: int = 8) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield (torch.randn(each * size, 3, 8, 8, generator=generator).cuda(),
               torch.randint(0, 5, (each * size,), generator=generator).cuda())


def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def same_everywhere(model: Any) -> None:
    hvd.check_replicas(model.state_dict())

