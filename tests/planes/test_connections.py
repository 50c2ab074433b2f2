"""Which ranks connect with which: as few as a collective needs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.types import Collective
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import Plan
from tests.planes import makers


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

    def step(rank: int) -> None:
        def wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
            while not predicate():
                bells[rank].wait(0.05)
                bells[rank].clear()

        response = Response(names=("x",), collective=Collective.ALLGATHER, dtype=dtype, rows=rows, row_elements=2,
                            contributors=tuple(range(size)))
        mine = np.full(2 * rows[rank], rank, kind)
        planes[rank].execute(Plan(1, tuple(range(size)), response, [mine], [outputs[rank]]), wait_until)

    workers = [threading.Thread(target=step, args=(rank,)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    for rank, plane in enumerate(planes):
        plane.close()
        assert outputs[rank].tolist() == np.repeat(np.arange(size), np.array(rows) * 2).tolist()
    (board,) = boards
    first_ranks = {makers.HOSTS[size].index(host) for host in makers.HOSTS[size]}
    assert {rank for pair in board.fetched for rank in pair} <= first_ranks < set(range(size))
