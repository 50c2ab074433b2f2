"""Programs of test_send.py."""

from __future__ import annotations

import numpy as np

import hvdlite as hvd


def between_processes() -> None:
    hvd.init()
    rank = hvd.rank()
    for count in (1, 3_000_000):
        if rank == 0:
            for other in (1, 2):
                hvd.send(np.full(count, 7.0 + other), other)
            print(hvd.recv(np.empty(2), 2, name="back"))
        else:
            assert (hvd.recv(np.empty(count), 0) == 7 + rank).all()
            if rank == 2:
                hvd.send([1.0, 2.0], 0, name="back")
    assert hvd.allreduce(np.ones(4), op=hvd.Sum).tolist() == [3] * 4
