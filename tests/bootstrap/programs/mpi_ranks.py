"""Writes down which rank it is, with communicators and without."""

import json
import sys

import numpy as np
from mpi4py import MPI

import hvdlite as hvd

world, how = MPI.COMM_WORLD, sys.argv[1]
given = {"none": lambda: None, "world": lambda: world, "split": lambda: world.Split(world.rank % 2, -world.rank),
         "ranks": lambda: [0, 2] if world.rank in (0, 2) else [3, 1]}[how]()
for _ in range(2):
    hvd.init(comm=given)
    total = hvd.allreduce(np.full(100_000, world.rank), op=hvd.Sum)[0]
    with open(f"{sys.argv[2]}/{world.rank}", "a") as out:
        print(json.dumps([hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
                          hvd.cross_size(), int(total), hvd.mpi_enabled() and hvd.mpi_threads_supported()]), file=out)
    hvd.shutdown()
