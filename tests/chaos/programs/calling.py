"""A script that lets ranks call a function, `hvdlite.run`, in which one of them may come to an end."""

from __future__ import annotations

import os
import signal
import sys

import hvdlite as hvd


def reduced(size: int, end: str, who: int) -> tuple[int, float]:
    """Return this rank, and what the ranks have reduced.

    Args:
        end: "raise" or "kill", of the rank `who`; anything else: no end.
    """
    import numpy as np

    hvd.init()
    total = hvd.allreduce(np.full(size, 1.0), op=hvd.Sum, name="before")
    if hvd.rank() == who and end == "raise":
        raise KeyError("the script's own")
    if hvd.rank() == who and end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    total = total + hvd.allreduce(np.full(size, 1.0), op=hvd.Sum, name="after")
    return hvd.rank(), float(total[0])


if __name__ == "__main__":
    result = hvd.run(reduced, args=(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])), np=2)
    assert result == [(0, 4.0), (1, 4.0)], result
    print("called", flush=True)
