"""The planes of all ranks of a small world, one maker a plane, as the contract suite wants them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence

import pytest

from hvdlite.core.world import Hosts
from hvdlite.memory.fence import Fence, fence_file
from hvdlite.memory.shared import SharedMemory, anonymous_file
from hvdlite.planes.base import Plane, WaitUntil
from hvdlite.planes.gloo import gloo_plane
from hvdlite.planes.hierarchical import HierarchicalPlane
from hvdlite.planes.loopback import LoopbackPlane, Table
from hvdlite.planes.mpi import mpi_plane
from hvdlite.planes.shm import ShmPlane
from tests.planes import under_mpi


def loopback(size: int, ring: Callable[[int], None]) -> list[Plane]:
    table = Table()
    return [LoopbackPlane(rank, table, ring) for rank in range(size)]


def shm(size: int, ring: Callable[[int], None], slot: int = 1 << 16, direct: int = 256, *,
        fenced: bool = False) -> list[Plane]:
    """Small slots and a low threshold, so that small tensors already take several pieces and both algorithms."""
    file, order = anonymous_file(), fence_file()
    planes = [ShmPlane(rank, SharedMemory(os.dup(file), rank, Fence(os.dup(order)) if fenced else None), ring, slot=slot,
                       chunk=1 << 12, direct=direct) for rank in range(size)]
    os.close(file)
    os.close(order)
    for plane in planes:
        plane.open_set(0, tuple(range(size)))
    return planes


def shm_fenced(size: int, ring: Callable[[int], None]) -> list[Plane]:
    """As on machines that reorder stores."""
    return shm(size, ring, fenced=True)


class Swap:
    """What the control plane does for planes that connect: texts by label."""

    def __init__(self, wake_all: Callable[[], object]) -> None:
        self._lock, self._wake_all = threading.Lock(), wake_all
        self._texts: dict[tuple[str, int], bytes] = {}

    def of(self, rank: int) -> Callable[..., list[bytes]]:
        def swap(label: str, ranks: Sequence[int], text: bytes, wait_until: WaitUntil) -> list[bytes]:
            with self._lock:
                assert (label, rank) not in self._texts, "a label is used again"
                self._texts[label, rank] = text
            self._wake_all()
            wait_until(lambda: all((label, each) in self._texts for each in ranks))
            return [self._texts[label, each] for each in ranks]
        return swap


def gloo(size: int, ring: Callable[[int], None]) -> list[Plane]:
    pytest.importorskip("torch")
    swap = Swap(lambda: [ring(rank) for rank in range(size)])
    return [gloo_plane(rank, swap.of(rank), functools.partial(ring, rank), "127.0.0.1", timeout=60, chunk=1 << 12)
            for rank in range(size)]


HOSTS = {1: "a", 2: "ab", 3: "abb", 4: "abba"}
"""Which host each rank of a world is on: hosts of one and two ranks, and ranks that do not lie beside each other."""


def hierarchical(size: int, ring: Callable[[int], None]) -> list[Plane]:
    files = {host: anonymous_file() for host in HOSTS[size]}
    hosts = Hosts.of(HOSTS[size])
    planes = [HierarchicalPlane(rank, hosts, SharedMemory(os.dup(files[HOSTS[size][rank]]), rank), ring, engine,
                                slot=1 << 16, chunk=1 << 12, direct=256) for rank, engine in enumerate(gloo(size, ring))]
    for plane in planes:
        plane.open_set(0, tuple(range(size)))
    return planes


def mpi(size: int, ring: Callable[[int], None]) -> list[Plane]:
    """This process's plane only."""
    return [mpi_plane(under_mpi.world(size).Dup(), chunk=1 << 12)]


def hierarchical_mpi(size: int, ring: Callable[[int], None]) -> list[Plane]:
    """Processes of one host each, as far as the plane can see: what happens inside a host is tested with Gloo."""
    hosts, rank = Hosts.of([str(rank) for rank in range(size)]), under_mpi.world(size).rank
    plane = HierarchicalPlane(rank, hosts, SharedMemory(anonymous_file(), rank), ring, mpi(size, ring)[0], slot=1 << 16,
                              chunk=1 << 12, direct=256)
    plane.open_set(0, tuple(range(size)))
    return [plane]
