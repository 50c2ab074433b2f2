"""Calls a function on the ranks of several hosts."""

import sys

import hvdlite


def work(factor: int) -> tuple[str, int, int]:
    import socket

    import numpy as np

    import hvdlite as hvd
    hvd.init()
    if factor == 0 and hvd.rank() == 1:
        raise KeyError("bad batch")
    return socket.gethostname(), hvd.local_rank(), factor * int(hvd.allreduce(np.array(1), op=hvd.Sum))


options = ["--ssh-args=" + sys.argv[2]]
print(hvdlite.run(work, (10,), hosts=sys.argv[1], options=options))
try:
    hvdlite.run(work, (0,), hosts=sys.argv[1], options=options)
except KeyError as error:
    print("raised", error, str(error.__cause__).splitlines()[0])
