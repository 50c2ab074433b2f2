"""Programs in the processes of a job: one rank's main functions."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

import hvdlite_torch.distributed
from tests.fuzzing import BEGUN, FINE, WrongError
from tests.torch.distributed.fuzz.program import STEPS, Rank, draw

TIMEOUT: Final = datetime.timedelta(seconds=60)
REOPENED: Final = 25
"""After so many programs the default group is destroyed and made again."""
SETTLES_SECONDS: Final = 10.0
MORE: Final = 4
"""Descriptors and threads that may be there at one moment and not at another, such as a worker thread's."""


def main(seeds: Sequence[int], folder: str, calls: Sequence[str] = (), steps: Sequence[int] = (0, STEPS)) -> None:
    """Run the programs of some seeds; every rank of a job calls this with the same ones.

    Args:
        folder: where the ranks meet; each job has another one.
        calls, steps: see `draw`.
    """
    rank, size = int(os.environ["HVDLITE_RANK"]), int(os.environ["HVDLITE_SIZE"])
    torch.set_num_threads(1)
    first: tuple[list[str], list[str]] = ([], [])
    for number, seed in enumerate(seeds):
        if number % REOPENED == 0:
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group(hvdlite_torch.distributed.NAME, init_method=f"file://{folder}/{seeds[0]}-{number}",
                                    rank=rank, world_size=size, timeout=TIMEOUT)
        print(BEGUN, seed, flush=True)
        Rank(seed, TIMEOUT).run(draw(seed, size, calls, range(*steps)))
        print(FINE, seed, flush=True)
        dist.barrier()
        if number == 4:
            first = kept()
        elif number > 4:
            check_kept(first)
    dist.destroy_process_group()


def kept() -> tuple[list[str], list[str]]:
    """Return the descriptors and the threads of this process."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            descriptors.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(descriptors), sorted(thread.name for thread in threading.enumerate())


def check_kept(before: tuple[list[str], list[str]]) -> None:
    """Check that descriptors and threads do not grow; a group's own runtime ends a moment after the last rank has left it.

    Raises:
        WrongError: when they do.
    """
    until = time.monotonic() + SETTLES_SECONDS
    while True:
        gc.collect()
        now = kept()
        grown = [len(found) - len(had) for found, had in zip(now, before, strict=True)]
        if max(grown) <= MORE:
            return
        if time.monotonic() > until:
            raise WrongError(f"descriptors and threads grow from {before} to {now}")
        time.sleep(0.05)
