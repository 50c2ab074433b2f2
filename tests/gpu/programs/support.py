"""What programs of ranks on GPUs have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

import hvdlite_torch as hvd
from benchmarks.gpu_sheet import Setup

GPU = "cuda"
"""The type of the GPUs' device in torch; tests of these programs put the CPU in its place."""


def begin(shared_gpu: bool = True) -> tuple[int, int, torch.device]:
    """Start this rank; return which it is, how many there are, and its GPU.

    Args:
        shared_gpu: whether it is allowed that ranks share a GPU.
    """
    gpu = Setup(int(os.environ["HVDLITE_RANK"]), int(os.environ["HVDLITE_SIZE"])).gpu()
    if not shared_gpu:
        os.environ["HVDLITE_SHARED_GPU"] = "0"
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    hvd.init()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return hvd.rank(), hvd.size(), gpu


def net(seed: int = 3, wide: int = 64) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, track_running_stats=False),
                                torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, wide), torch.nn.Tanh(),
                                torch.nn.Linear(wide, 5))
    return model.to(GPU)


def batches(steps: int, size: int, each: int = 8) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield (torch.randn(each * size, 3, 8, 8, generator=generator).to(GPU),
               torch.randint(0, 5, (each * size,), generator=generator).to(GPU))


def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def same_everywhere(model: Any) -> None:
    hvd.check_replicas(model.state_dict())

