"""A script for `torch.distributed` as any launcher starts it; with --ours the launcher's variables become torch's first."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import hvdlite_torch.distributed

if __name__ == "__main__":
    if "--ours" in sys.argv:
        hvdlite_torch.distributed.set_environment()
    dist.init_process_group("hvdlite")
    mine = torch.full((1,), float(dist.get_rank() + 1))
    dist.all_reduce(mine)
    rank, size, local_rank = dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank()
    sys.stdout.write(f"rank {rank} of {size}, local {local_rank}: {mine.item():g}\n")
    dist.destroy_process_group()
