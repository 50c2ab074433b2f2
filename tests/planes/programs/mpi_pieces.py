"""Collectives of the MPI process group on arrays that are longer than a call allows."""

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from hvdlite.core.types import ReduceOp
from hvdlite.planes import mpi

mpi.CALL_LIMIT = 1 << 12
group = mpi.MpiProcessGroup(MPI, MPI.COMM_WORLD.Dup(), (0, 1, 2))


def wait(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
    while not predicate():
        pass


me, count = MPI.COMM_WORLD.rank, 5000
rows = [1000 * (rank + 1) for rank in range(3)]
bounds = [0, 1000, 3000, 6000]
values = np.arange(count, dtype=np.int64)
group.allreduce(values, ReduceOp.SUM, wait)
assert (values == 3 * np.arange(count)).all()
values = np.arange(count, dtype=np.int64) + me
group.reduce(values, ReduceOp.SUM, 1, wait)
assert me != 1 or (values == 3 * np.arange(count) + 3).all()
values = np.full(count, me, np.uint8)
group.broadcast(values, 2, wait)
assert (values == 2).all()
own = np.full(rows[me], me, np.float32)
out = np.zeros(6000, np.float32)
group.allgather(own, out, bounds, wait)
assert (out == np.repeat([0, 1, 2], rows)).all()
out[:] = 0
group.gather(own, out if me == 1 else None, bounds, 1, wait)
assert me != 1 or (out == np.repeat([0, 1, 2], rows)).all()
group.scatter(np.repeat([4, 5, 6], rows).astype(np.float32) if me == 2 else None, own, bounds, 2, wait)
assert (own == me + 4).all()
sent = np.repeat(np.arange(3) + 10 * me, rows).astype(np.float32)
got = np.zeros(3 * rows[me], np.float32)
group.alltoall(sent, bounds, got, [0, rows[me], 2 * rows[me], 3 * rows[me]], 9000, wait)
assert (got == np.repeat([me, me + 10, me + 20], rows[me])).all()
group.close()
print("fine")
