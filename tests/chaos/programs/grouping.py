"""Ranks of `torch.distributed` that make groups, and reduce and send in them."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

WRONG = 99
"""The exit code of a rank that has got something else than the others have sent."""


def main() -> None:
    """Make groups, and compare what they bring."""
    dist.init_process_group("hvdlite", timeout=datetime.timedelta(seconds=8))
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(3):
        group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=8))
        mine = torch.full((1000,), float(rank + number))
        dist.all_reduce(mine, group=group)
        found = [f"from rank {rank}" if rank == 0 else None]
        dist.broadcast_object_list(found, src=0, group=group)
        if mine.tolist() != [sum(range(size)) + size * number] * 1000 or found != ["from rank 0"]:
            print("WRONG", mine[0], found, flush=True)
            os._exit(WRONG)
    print("grouped", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
