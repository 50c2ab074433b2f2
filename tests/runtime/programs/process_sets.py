"""Programs of test_process_sets.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite as hvd


def process_sets_on_processes_through_the_public_interface() -> None:
    even, odd = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])
    hvd.init(process_sets=[even, odd])
    rank = hvd.rank()
    mine = even if rank % 2 == 0 else odd
    assert (even.process_set_id, odd.process_set_id) == (1, 2) and mine.included() and mine.rank() == rank // 2
    for size in (1, 100_000, 3_000_000):
        array = np.full(size, rank, np.float32)
        assert (hvd.allreduce(array, op=hvd.Sum, process_set=mine) == (2 if rank % 2 == 0 else 4)).all()
        assert (hvd.allreduce(array, op=hvd.Sum) == 6).all()
    low = hvd.add_process_set([0, 1, 2])
    if low.included():
        for _ in range(20):
            assert hvd.allgather(np.array([rank]), process_set=low).tolist() == [0, 1, 2]
            received, _ = hvd.alltoall(np.full((3, 2), rank), splits=[1, 1, 1], process_set=low)
            assert received[:, 0].tolist() == [0, 1, 2]
    assert hvd.remove_process_set(low) and low.process_set_id is None and not hvd.remove_process_set(low)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.global_process_set.size() == 4
    hvd.shutdown()
    assert even.process_set_id is odd.process_set_id is None
    hvd.init(process_sets=[odd, even, [0, 1, 3]])  # in another order
    assert (odd.process_set_id, even.process_set_id) == (1, 2)
    assert (hvd.allreduce(np.full(3, rank), op=hvd.Sum, process_set=mine) == (2 if rank % 2 == 0 else 4)).all()
    wrong: Any
    for wrong, told in ((hvd.ProcessSet([0]), "is not registered"), ([0, 2], "not [0, 2]"), (1, "not 1")):
        try:
            hvd.allreduce(np.ones(1), process_set=wrong)
        except ValueError as error:
            assert told in str(error), error
        else:
            raise SystemExit("no error")
    hvd.shutdown()


def a_rank_that_dies_while_a_set_is_removed_is_named(ready: str) -> None:
    hvd.init()
    own = hvd.add_process_set([0, 1])
    if hvd.rank() < 2:
        hvd.allreduce(np.ones(50_000), process_set=own)
    Path(f"{ready}.{hvd.rank()}").touch()
    if hvd.rank() == 1:
        while not all(os.path.exists(f"{ready}.{other}") for other in (0, 2)):  # they have their results
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        hvd.remove_process_set(own)
    except hvd.PeerLostError as error:
        assert error.rank == 1 and time.monotonic() - begun < 10, error
        print("named")
