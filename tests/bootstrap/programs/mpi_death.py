"""Rank 1 dies in the middle."""

import os
import sys

import numpy as np

import hvdlite as hvd

hvd.init()
values = np.ones(400_000, np.float32)
for step in range(10**9):
    hvd.allreduce(values, name="x")
    if step == 20 and hvd.rank() == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), 9)
        raise RuntimeError("it gives up")
