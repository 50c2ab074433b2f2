"""Programs of test_large.py."""

from __future__ import annotations

import numpy as np

import hvdlite as hvd


def more_than_two_to_the_31_elements() -> None:
    hvd.init()
    rank, count = hvd.rank(), (1 << 31) + 10
    big = np.full(count, rank + 1, np.uint8)
    hvd.allreduce_(big, op=hvd.Sum)
    assert big[0] == big[1 << 31] == big[-1] == 3 and (big[::1 << 16] == 3).all()
    big[-1] = 5 + rank
    assert hvd.broadcast_(big, 1)[-1] == 6
    everything = hvd.allgather(big[:(1 << 30) + rank])
    assert everything.shape == ((1 << 31) + 1,) and everything[-1] == 3
