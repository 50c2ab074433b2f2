"""Programs of test_init_fails.py."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np

import hvdlite as hvd
from hvdlite.core.errors import ConfigError, LaunchError, PeerFailedError, UnsupportedError
from hvdlite.memory.shared import SharedMemory
from hvdlite.planes.selection import choose_plane
from hvdlite.runtime import assemble
from tests.held import open_files
from tests.raising import raises


def left() -> tuple[list[str], dict[str, int]]:
    """Return the names of our threads, and the open files by their kinds."""
    for thread in threading.enumerate():
        if thread.name.startswith("hvdlite"):
            thread.join(10)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("hvdlite")]
    return names, open_files()


class Job:
    """A job that has worked once.

    Attributes:
        before: what was left of it.
    """

    def __init__(self) -> None:
        gc.disable()  # what is left is not to be collected by chance
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.total = sum(range(self.size))
        hvd.shutdown()
        self.before = left()

    def works(self) -> None:
        hvd.init()
        assert (hvd.allreduce(np.full(100_000, self.rank), op=hvd.Sum) == self.total).all()
        hvd.shutdown()


@contextlib.contextmanager
def patched(owner: object, function: Callable[..., object], error: BaseException) -> Iterator[None]:
    """Let a function that the owner has under its own name raise an error."""
    def fail(*_: object) -> None:
        raise error
    setattr(owner, function.__name__, fail)
    yield
    setattr(owner, function.__name__, function)


def process_sets_that_cannot_be() -> None:
    job = Job()
    for _ in range(2):
        own_or_another_ranks = UnsupportedError, PeerFailedError
        raises(own_or_another_ranks, "[0, 7]", lambda: hvd.init(process_sets=[*([[0]] if job.size > 1 else []), [0, 7]]))
        assert not hvd.is_initialized()
        assert left() == job.before, (left(), job.before)
    job.works()


def a_further_init_that_fails_leaves_the_runtime_to_the_others() -> None:
    job = Job()
    hvd.init()
    raises(UnsupportedError, "7", lambda: hvd.init(process_sets=[[0, 7]]))
    assert (hvd.allreduce(np.full(3, job.rank), op=hvd.Sum) == job.total).all()
    hvd.shutdown()
    assert not hvd.is_initialized()


def a_timeline_that_cannot_be_written() -> None:
    job = Job()
    os.environ["HVDLITE_TIMELINE"] = "/there/is/no/such/directory/timeline.json"
    if job.rank == 0:
        raises(ConfigError, "no/such/directory", hvd.init)
        assert left() == job.before, (left(), job.before)
    else:
        def use() -> None:
            hvd.init()  # rank 0 may have failed by now
            hvd.allreduce(np.ones(3))
        raises(PeerFailedError, "no/such/directory", use)
        hvd.shutdown()
    del os.environ["HVDLITE_TIMELINE"]
    job.works()


def a_plane_that_cannot_be_made() -> None:
    job = Job()
    with patched(assemble, choose_plane, LaunchError("no plane connects these hosts")):
        raises(LaunchError, "no plane", hvd.init)
        assert left() == job.before, (left(), job.before)
    job.works()


def no_memory_for_the_plane() -> None:
    job = Job()
    with patched(SharedMemory, SharedMemory.allocate, MemoryError("no memory for 65536 bytes")):
        raises(MemoryError, "no memory", hvd.init)
        assert left() == job.before, (left(), job.before)
    job.works()
