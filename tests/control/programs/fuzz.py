"""Programs of test_fuzz.py."""

from __future__ import annotations

import os
import resource
import time

import numpy as np

import hvdlite as hvd


def reduce_until_told(is_late: bool, proxy: int | None = None) -> None:
    """Work until a file in the job directory ends it; rank 2 may wait for another one, rank 1 comes through a port."""
    rank = int(os.environ["HVDLITE_RANK"])
    if rank == 2:
        print("late", flush=True)
        while is_late and not os.path.exists(os.environ["HVDLITE_JOB_DIRECTORY"] + "/join"):
            time.sleep(0.01)
    if rank == 1 and proxy is not None:
        os.environ["HVDLITE_COORDINATOR"] = f"127.0.0.1:{proxy}"
    hvd.init()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("ready", flush=True)
    turn = 0
    while not hvd.broadcast(np.array(os.path.exists(os.environ["HVDLITE_JOB_DIRECTORY"] + "/go")), 0):
        total = hvd.allreduce(np.full(1000, float(turn)), op=hvd.Sum)
        assert (total == 3 * turn).all()
        turn += 1
        time.sleep(0.005)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, f"{grown} KiB more"
    print("done", flush=True)
