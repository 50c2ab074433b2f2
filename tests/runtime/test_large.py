"""Tensors over 2 GiB and over 2^31 elements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worlds import processes

NEEDED = 12 << 30


def available() -> int:
    """Return the bytes that processes could still get, or 0 when the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


@pytest.mark.long
@pytest.mark.skipif(available() < NEEDED, reason=f"needs {NEEDED >> 30} GiB of memory")
def test_more_than_two_to_the_31_elements() -> None:
    processes(2, """
        import numpy as np, hvdlite as hvd
        hvd.init()
        rank, count = hvd.rank(), (1 << 31) + 10
        big = np.full(count, rank + 1, np.uint8)
        hvd.allreduce_(big, op=hvd.Sum)
        assert big[0] == big[1 << 31] == big[-1] == 3 and (big[::1 << 16] == 3).all()
        big[-1] = 5 + rank
        assert hvd.broadcast_(big, 1)[-1] == 6
        everything = hvd.allgather(big[:(1 << 30) + rank])
        assert everything.shape == ((1 << 31) + 1,) and everything[-1] == 3
    """, timeout=150)
