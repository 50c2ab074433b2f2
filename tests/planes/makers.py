"""The planes of all ranks of a small world, one maker a plane, as the contract suite wants them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence

import pytest

from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.kernel_files import anonymous_file
from hvdlite.core.world import Hosts
from hvdlite.memory.fence import Fence, fence_file
from hvdlite.memory.shared import SharedMemory
from hvdlite.planes.base import Plane, WaitUntil
from hvdlite.planes.gloo import gloo_plane
from hvdlite.planes.hierarchical import HierarchicalPlane
from hvdlite.planes.loopback import LoopbackHub, LoopbackPlane
from hvdlite.planes.mpi import mpi_plane
from hvdlite.planes.shm import ShmPlane
from hvdlite.planes.shm_barrier import one_by_one
from tests.planes import under_mpi


def loopback(size: int, wake_rank: Callable[[int], None]) -> list[Plane]:
    hub = LoopbackHub()
    return [LoopbackPlane(rank, hub, wake_rank) for rank in range(size)]


def shm(size: int, wake_rank: Callable[[int], None], slot: int = 1 << 16, direct: int = 256, *,
        fenced: bool = False) -> list[Plane]:
    """Small slots and a low threshold, so that small tensors already take several pieces and both algorithms."""
    file, order = anonymous_file(), fence_file()
    planes = [ShmPlane(rank, SharedMemory(os.dup(file), rank, Fence(os.dup(order)) if fenced else None),
                       one_by_one(wake_rank), slot=slot, chunk=1 << 12, direct=direct) for rank in range(size)]
    os.close(file)
    os.close(order)
    for plane in planes:
        plane.add_process_set(0, tuple(range(size)))
    return planes


def shm_fenced(size: int, wake_rank: Callable[[int], None]) -> list[Plane]:
    """As on machines that reorder stores."""
    return shm(size, wake_rank, fenced=True)


class Board:
    """What the control plane does for planes that connect: texts by label and rank."""

    def __init__(self, wake_all: Callable[[], object]) -> None:
        self.arrived, self._wake_all = threading.Condition(), wake_all
        self.texts: dict[tuple[str, int], bytes] = {}
        self.fetched: list[tuple[int, int]] = []  # by whom, from whom

    def put(self, label: str, rank: int, text: bytes) -> None:
        with self.arrived:
            assert (label, rank) not in self.texts, "a label is used again"
            self.texts[label, rank] = text
            self.arrived.notify_all()
        self._wake_all()


class BoardOob:
    """One rank's `OobChannel` on a board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def publish(self, label: str, text: bytes) -> None:
        self._board.put(label, self._rank, text)

    def fetch(self, label: str, sender: int, wait_until: WaitUntil,
              is_cancelled: Callable[[], bool] = lambda: False) -> bytes:
        with self._board.arrived:
            self._board.fetched.append((self._rank, sender))
            assert self._board.arrived.wait_for(lambda: (label, sender) in self._board.texts or is_cancelled(), 30)
            if (label, sender) not in self._board.texts:
                raise HorovodInternalError("cancelled")
            return self._board.texts[label, sender]

    def look(self) -> None:
        with self._board.arrived:
            self._board.arrived.notify_all()

    def withdraw(self, label: str) -> None:
        pass

    def gather_and_broadcast(self, label: str, ranks: Sequence[int], text: bytes, answer: Callable[[list[bytes]], bytes],
                             wait_until: WaitUntil) -> bytes:
        texts, question = self._board.texts, f"{label}?"
        self._board.put(question, self._rank, text)
        if self._rank == ranks[0]:
            wait_until(lambda: all((question, each) in texts for each in ranks))
            self._board.put(label, self._rank, answer([texts[question, each] for each in ranks]))
        wait_until(lambda: (label, ranks[0]) in texts)
        return texts[label, ranks[0]]


def gloo(size: int, wake_rank: Callable[[int], None]) -> list[Plane]:
    pytest.importorskip("torch")
    board = Board(lambda: [wake_rank(rank) for rank in range(size)])
    return [gloo_plane(rank, BoardOob(board, rank), functools.partial(wake_rank, rank), "127.0.0.1", timeout=60,
                       chunk=1 << 12)
            for rank in range(size)]


HOSTS = {1: "a", 2: "ab", 3: "abb", 4: "abba"}
"""Which host each rank of a world is on: hosts of one and two ranks, and ranks that do not lie beside each other."""


def hierarchical(size: int, wake_rank: Callable[[int], None]) -> list[Plane]:
    files = {host: anonymous_file() for host in HOSTS[size]}
    hosts = Hosts.of(HOSTS[size])
    planes = [HierarchicalPlane(rank, hosts, SharedMemory(os.dup(files[HOSTS[size][rank]]), rank),
                                one_by_one(wake_rank), cross_plane, slot=1 << 16, chunk=1 << 12, direct=256) for rank,
              cross_plane in enumerate(gloo(size, wake_rank))]
    for plane in planes:
        plane.add_process_set(0, tuple(range(size)))
    return planes


def mpi(size: int, wake_rank: Callable[[int], None]) -> list[Plane]:
    """This process's plane only."""
    return [mpi_plane(under_mpi.duplicate(size), chunk=1 << 12)]


def hierarchical_mpi(size: int, wake_rank: Callable[[int], None]) -> list[Plane]:
    """Processes of one host each, as far as the plane can see: what happens inside a host is tested with Gloo."""
    hosts, rank = Hosts.of([str(rank) for rank in range(size)]), under_mpi.world(size).rank
    plane = HierarchicalPlane(rank, hosts, SharedMemory(anonymous_file(), rank), one_by_one(wake_rank),
                              mpi(size, wake_rank)[0], slot=1 << 16, chunk=1 << 12, direct=256)
    plane.add_process_set(0, tuple(range(size)))
    return [plane]
