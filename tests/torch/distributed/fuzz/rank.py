"""Programs in the processes of a job: one rank's main functions."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

import hvdlite_torch.distributed
from tests.fuzzing import BEGUN, FINE, WrongError
from tests.torch.distributed.fuzz.program import STEPS, Rank, draw

REOPENED: Final = 25
"""After so many programs the default group is destroyed and made again."""


def main(seeds: Sequence[int], folder: str, calls: Sequence[str] = (), steps: Sequence[int] = (0, STEPS)) -> None:
    """Run the programs of some seeds; every rank of a job calls this with the same ones.

    Args:
        folder: where the ranks meet; each job has another one.
        calls, steps: see `draw`.
    """
    rank, size = int(os.environ["HVDLITE_RANK"]), int(os.environ["HVDLITE_SIZE"])
    torch.set_num_threads(1)
    first: tuple[int, int] | None = None
    for number, seed in enumerate(seeds):
        if number % REOPENED == 0:
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group(hvdlite_torch.distributed.NAME, init_method=f"file://{folder}/{seeds[0]}-{number}", rank=rank,
                                    world_size=size, timeout=datetime.timedelta(seconds=45))
        print(BEGUN, seed, flush=True)
        Rank(seed).run(draw(seed, size, calls, range(*steps)))
        print(FINE, seed, flush=True)
        dist.barrier()
        if number == 4:
            first = kept()
        elif first is not None and number > 4 and any(now > then + 12 for now, then in zip(kept(), first, strict=True)):
            raise WrongError(f"descriptors and threads grow from {first} to {kept()}")
    dist.destroy_process_group()


def kept() -> tuple[int, int]:
    """Return the numbers of descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()
