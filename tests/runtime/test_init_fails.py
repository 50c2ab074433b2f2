"""An `init()` that fails leaves nothing behind, tells the other ranks, and can be called again."""

from __future__ import annotations

import pytest

from tests.worlds import RAISES, processes

LEFT = RAISES + """
import gc, os, threading
import numpy as np
import hvdlite as hvd
from hvdlite.core.errors import ConfigError, LaunchError, PeerFailedError, UnsupportedError

def open_files():
    targets = []
    for number in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass  # the listing's own
    return targets

def left():
    for thread in threading.enumerate():
        if thread.name.startswith("hvdlite"):
            thread.join(10)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("hvdlite")]
    kinds = [target.split(":")[0] for target in open_files()]
    return names, sorted(kinds)

gc.disable()  # what is left is not to be collected by chance
hvd.init()
rank, size = hvd.rank(), hvd.size()
total = sum(range(size))
hvd.shutdown()
before = left()

def works():
    hvd.init()
    assert (hvd.allreduce(np.full(100_000, rank), op=hvd.Sum) == total).all()
    hvd.shutdown()
"""


@pytest.mark.parametrize("size", [1, 2])
def test_process_sets_that_cannot_be(size: int) -> None:
    processes(size, LEFT + """
for _ in range(2):
    own_or_another_ranks = UnsupportedError, PeerFailedError
    raises(own_or_another_ranks, "[0, 7]", lambda: hvd.init(process_sets=[*([[0]] if size > 1 else []), [0, 7]]))
    assert not hvd.is_initialized()
    assert left() == before, (left(), before)
works()
""")


def test_a_further_init_that_fails_leaves_the_runtime_to_the_others() -> None:
    processes(2, LEFT + """
hvd.init()
raises(UnsupportedError, "7", lambda: hvd.init(process_sets=[[0, 7]]))
assert (hvd.allreduce(np.full(3, rank), op=hvd.Sum) == total).all()
hvd.shutdown()
assert not hvd.is_initialized()
""")


@pytest.mark.parametrize("size", [1, 2])
def test_a_timeline_that_cannot_be_written(size: int) -> None:
    """Only rank 0 writes it and fails; the others hear why, in init() or in their next call."""
    processes(size, LEFT + """
os.environ["HVDLITE_TIMELINE"] = "/there/is/no/such/directory/timeline.json"
if rank == 0:
    raises(ConfigError, "no/such/directory", hvd.init)
    assert left() == before, (left(), before)
else:
    def use():
        hvd.init()  # rank 0 may have failed by now
        hvd.allreduce(np.ones(3))
    raises(PeerFailedError, "no/such/directory", use)
    hvd.shutdown()
del os.environ["HVDLITE_TIMELINE"]
works()
""")


def test_a_plane_that_cannot_be_made() -> None:
    """It is chosen when the ranks have met and share their memory."""
    processes(2, LEFT + """
from hvdlite.runtime import assemble
def no_plane(*_):
    raise LaunchError("no plane connects these hosts")
choose_plane, assemble.choose_plane = assemble.choose_plane, no_plane
raises(LaunchError, "no plane", hvd.init)
assert left() == before, (left(), before)
assemble.choose_plane = choose_plane
works()
""")


def test_no_memory_for_the_plane() -> None:
    processes(2, LEFT + """
from hvdlite.memory import shared
def no_memory(*_):
    raise MemoryError("no memory for 65536 bytes")
allocate, shared.SharedMemory.allocate = shared.SharedMemory.allocate, no_memory
raises(MemoryError, "no memory", hvd.init)
assert left() == before, (left(), before)
shared.SharedMemory.allocate = allocate
works()
""")
