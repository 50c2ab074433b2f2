"""Counts samples, at a rate that depends on --batch-size."""

import sys
import time

import numpy as np

import hvdlite as hvd

hvd.init()
batch = int(sys.argv[sys.argv.index("--batch-size") + 1]) if "--batch-size" in sys.argv else 10
for _step in range(30):
    hvd.allreduce(np.ones(10), name="x")
    time.sleep(0.01 + 0.0001 * batch)
    hvd.record_step(batch)
