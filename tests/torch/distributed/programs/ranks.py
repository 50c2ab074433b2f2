"""How a rank of a test begins with `torch.distributed`."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

RANK = int(os.environ.get("HVDLITE_RANK", "0"))
SIZE = int(os.environ.get("HVDLITE_SIZE", "1"))


def begin(folder: str, backend: str = "hvdlite", *, size: int = SIZE, seconds: float = 60.0, **settings: Any) -> None:
    """Make the default group; the ranks meet in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store-{backend.replace(':', '-')}", rank=RANK,
                            world_size=size, timeout=datetime.timedelta(seconds=seconds), **settings)
