"""Allreduces without end; one rank fails as the arguments say, or says that it is ready."""

import os
import sys

import numpy as np

import hvdlite as hvd

fault, rank = sys.argv[1], int(sys.argv[2])
print("pid", os.environ["HVDLITE_RANK"], os.getpid(), flush=True)
hvd.init()
for step in range(10**9):
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    if step == 10 and hvd.rank() == rank:
        if fault == "raise":
            raise ValueError("bad batch")
        if fault == "exit":
            sys.exit(5)
        print("ready", flush=True)
