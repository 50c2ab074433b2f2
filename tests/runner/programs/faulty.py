"""Allreduces without end; one rank fails as the arguments say, or says that it is ready. A third argument: all clean up."""

import os
import signal
import sys

import numpy as np

import hvdlite as hvd

fault, rank = sys.argv[1], int(sys.argv[2])
print("pid", os.environ["HVDLITE_RANK"], os.getpid(), flush=True)
hvd.init()
try:
    for step in range(10**9):
        hvd.allreduce(np.ones(1000, np.float32), name="gradient")
        if step == 10 and hvd.rank() == rank:
            if fault == "raise":
                raise ValueError("bad batch")
            if fault == "exit":
                sys.exit(5)
            if fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            print("ready", flush=True)
finally:
    if len(sys.argv) > 3:
        hvd.shutdown()
