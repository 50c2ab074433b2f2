"""Which ranks connect with which: as few as a collective needs."""

from __future__ import annotations

import contextlib
import importlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes import gloo_listener
from hvdlite.planes.base import Plan, Plane
from tests.planes import makers


def run_a_plan(planes: Sequence[Plane], bells: Sequence[threading.Event], plans: Sequence[Plan]) -> None:
    """Let each rank execute its plan, in a thread of its own."""
    def step(rank: int) -> None:
        def wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
            while not predicate():
                bells[rank].wait(0.05)
                bells[rank].clear()

        planes[rank].execute(plans[rank], wait_until)

    workers = [threading.Thread(target=step, args=(rank,)) for rank in range(len(planes))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_small_allgather_connects_the_hosts_first_ranks_only(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    size = 4
    boards: list[makers.Board] = []
    real = makers.Board.__init__

    def remembered(board: makers.Board, wake_all: Callable[[], object]) -> None:
        real(board, wake_all)
        boards.append(board)

    monkeypatch.setattr(makers.Board, "__init__", remembered)
    bells = [threading.Event() for _ in range(size)]
    planes = makers.hierarchical(size, lambda rank: bells[rank].set())
    rows, kind = (3, 0, 5, 2), SUPPORTED_DTYPES[dtype]
    outputs = [np.empty(2 * sum(rows), kind) for _ in range(size)]

    response = Response(names=("x",), collective=Collective.ALLGATHER, dtype=dtype, rows=rows, row_elements=2,
                        contributors=tuple(range(size)))
    run_a_plan(planes, bells, [Plan(1, tuple(range(size)), response, [np.full(2 * rows[rank], rank, kind)], [outputs[rank]])
                               for rank in range(size)])
    for rank, plane in enumerate(planes):
        plane.close()
        assert outputs[rank].tolist() == np.repeat(np.arange(size), np.array(rows) * 2).tolist()
    (board,) = boards
    first_ranks = {makers.HOSTS[size].index(host) for host in makers.HOSTS[size]}
    assert {rank for pair in board.fetched for rank in pair} <= first_ranks < set(range(size))


def test_a_rank_answers_others_while_it_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine that takes minutes; in the background thread itself it would look like a death."""
    waits, real = threading.Event(), importlib.import_module

    class Bell(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    def slow(module: str) -> object:
        assert module != "torch.distributed" or waits.wait(30), "nothing is heard while torch is imported"
        return real(module)

    monkeypatch.setattr(importlib, "import_module", slow)
    bells = [Bell() for _ in range(2)]
    planes = makers.gloo(2, lambda rank: bells[rank].set())
    outputs = [np.empty(1, np.float32) for _ in range(2)]
    response = Response(names=("x",), collective=Collective.ALLREDUCE, dtype="float32", op=ReduceOp.SUM, contributors=(0, 1))
    run_a_plan(planes, bells, [Plan(1, (0, 1), response, [np.ones(1, np.float32)], [outputs[rank]]) for rank in range(2)])
    assert outputs == [[2], [2]]
    for plane in planes:
        plane.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="socket filters are Linux's")
def test_strangers_cannot_connect_to_gloo_once_its_ranks_have() -> None:
    """Gloo would keep a descriptor for each as long as the job lasts, and abort the rank when there are none left."""
    size = 3
    before = listening_ports()
    bells = [threading.Event() for _ in range(size)]
    planes = makers.gloo(size, lambda rank: bells[rank].set())
    outputs = [np.empty(size, np.float32) for _ in range(size)]
    for _ in range(2):  # the connections that exist go on
        response = Response(names=("x",), collective=Collective.ALLGATHER, dtype="float32", rows=(1,) * size, row_elements=1,
                            contributors=tuple(range(size)))
        run_a_plan(planes, bells, [Plan(1, tuple(range(size)), response, [np.full(1, rank, np.float32)], [outputs[rank]])
                                   for rank in range(size)])
        assert all(output.tolist() == [0, 1, 2] for output in outputs)
    ports = listening_ports() - before
    assert len(ports) == size
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.05)
    for plane in planes:
        plane.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="socket filters are Linux's")
def test_a_listener_of_gloo_that_is_not_found_is_told_once(monkeypatch: pytest.MonkeyPatch,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    """By each rank, however many process sets it has."""
    monkeypatch.setattr(gloo_listener, "listeners", dict)
    size = 2
    bells = [threading.Event() for _ in range(size)]
    planes = makers.gloo(size, lambda rank: bells[rank].set())
    response = Response(names=("x",), collective=Collective.ALLGATHER, dtype="float32", rows=(1,) * size, row_elements=1,
                        contributors=tuple(range(size)))
    for process_set_id in (1, 2):
        run_a_plan(planes, bells, [Plan(process_set_id, tuple(range(size)), response, [np.ones(1, np.float32)],
                                        [np.empty(size, np.float32)]) for _ in range(size)])
    for plane in planes:
        plane.close()
    assert len(caplog.records) == size
    assert all("Gloo's port on this rank stays open" in record.message for record in caplog.records)


class GaveUp(Exception):
    """A rank does not wait any more."""


# docs/protocol.md#threads
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell which sockets are Gloo's")
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "waiting for an address"])
def test_operations_of_gloo_end_before_the_plane_is_closed(connected: bool) -> None:
    """Its threads would call into Python while the interpreter ends, when the other rank ends."""
    before = gloo_threads()
    bells = [threading.Event() for _ in range(2)]
    planes = makers.gloo(2, lambda rank: bells[rank].set())
    response = Response(names=("x",), collective=Collective.ALLGATHER, dtype="float32", rows=(1, 1), row_elements=1,
                        contributors=(0, 1))
    plans = [Plan(1, (0, 1), response, [np.ones(1, np.float32)], [np.empty(2, np.float32)]) for _ in range(2)]
    if connected:
        run_a_plan(planes, bells, plans)
    begun = time.monotonic()

    def wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        while not predicate():
            if time.monotonic() - begun > 0.3:
                raise GaveUp
            time.sleep(0.01)

    with pytest.raises(GaveUp):
        planes[0].execute(plans[0], wait_until)
    planes[0].close()
    planes[1].close()
    limit = time.monotonic() + 60
    while gloo_threads() > before:
        assert time.monotonic() < limit
        time.sleep(0.01)


def gloo_threads() -> int:
    """Return the number of threads of Gloo in this process."""
    found = 0
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found += "gloo" in (each / "comm").read_text()
    return found


def listening_ports() -> set[int]:
    """Return the ports at which this process listens."""
    return {int.from_bytes(address[2:4], "big") for address in gloo_listener.listeners().values()}
