"""The device on which a rank of the random comparisons trains."""

from __future__ import annotations

import os

import torch


def prepare(device: str) -> None:
    """Make this rank ready to train on a device; call it before `hvd.init()`.

    Args:
        device: "cpu", or "cuda": a GPU that the ranks share if there are not enough.
    """
    if device == "cpu":
        return
    from benchmarks.gpu_sheet import Setup
    Setup(int(os.environ["HVDLITE_RANK"]), int(os.environ["HVDLITE_SIZE"])).gpu()
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    # as on a CPU: derivatives of derivatives, and all bits of float32
    torch.backends.cudnn.enabled = torch.backends.cuda.matmul.allow_tf32 = False
