"""The parts of a split as process sets."""

import numpy as np
from mpi4py import MPI

import hvdlite as hvd

world = MPI.COMM_WORLD
halves = hvd.ProcessSet(world.Split(world.rank % 2, -world.rank))
pair = hvd.ProcessSet(world.Split(0 if world.rank in (1, 2) else MPI.UNDEFINED, world.rank))
assert halves.size() is None
hvd.init(world, process_sets=[halves, pair])
mine = [rank for rank in range(4) if rank % 2 == world.rank % 2]
assert halves.included() and halves.ranks == mine and halves.size() == 2 and halves.rank() == world.rank // 2, halves
assert hvd.allreduce(np.full(3, world.rank), op=hvd.Sum, process_set=halves)[0] == sum(mine)
assert (pair.ranks, pair.included()) == (([1, 2], True) if world.rank in (1, 2) else ([], None)), pair
if pair.included():
    assert hvd.allreduce(np.full(3, 1), op=hvd.Sum, process_set=pair)[0] == 2
assert halves.registered_ids == (1, 2) and pair.registered_ids == (3,)
assert hvd.remove_process_set(halves) and hvd.remove_process_set(pair) and not hvd.remove_process_set(halves)
assert halves.process_set_id is None and hvd.add_process_set([0, 2]).process_set_id == 4
hvd.shutdown()
