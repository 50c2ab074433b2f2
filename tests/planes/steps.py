"""Lets every rank of a world carry out plans: ranks as threads, or as processes under mpiexec."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hvdlite.core.array import Array
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import AlltoallSplits, BufferSlice, Plan, Plane, WaitUntil
from tests.planes import under_mpi

Step = Callable[[int, Callable[[Response, list[Any], list[Any]], None]], Any]


def run(make_planes: Callable[..., list[Plane]], size: int, step: Step) -> list[Any]:
    """Run `step(rank, execute)` on every rank; `execute` builds the next plan and carries it out."""
    if under_mpi.ACTIVE:
        return under_mpi.run(make_planes, size, lambda rank, plane, wait_until, barrier: step(
            rank, executor(rank, size, plane, wait_until, barrier)))
    bells = [threading.Event() for _ in range(size)]
    planes = make_planes(size, lambda rank: bells[rank].set())
    meeting = threading.Barrier(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        def wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
            while not predicate():
                assert not errors, "another rank failed"
                bells[rank].wait(poll_interval or 0.05)
                bells[rank].clear()

        try:
            results[rank] = step(rank, executor(rank, size, planes[rank], wait_until, meeting.wait))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    workers = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    for plane in planes:
        plane.close()
    if errors:
        raise errors[0]
    return results


def executor(rank: int, size: int, plane: Plane, wait_until: WaitUntil, barrier: Callable[[], object]) -> Any:
    """Return what executes one rank's plans."""
    counts: dict[int, int] = {}

    def execute(response: Response, sources: list[Array | None], outputs: list[Array | None],
                buffer_slice: BufferSlice | None = None, ranks: tuple[int, ...] = tuple(range(size)),
                splits: AlltoallSplits | None = None) -> None:
        sequence = counts[response.process_set_id] = counts.get(response.process_set_id, 0) + 1
        plane.execute(Plan(sequence, ranks, response, sources, outputs, buffer_slice, splits), wait_until)

    execute.wait_until, execute.barrier = wait_until, barrier  # type: ignore[attr-defined]
    execute.fusion_buffer, execute.plane = plane.fusion_buffer, plane  # type: ignore[attr-defined]
    execute.supports = getattr(plane, "supports", lambda response: True)  # type: ignore[attr-defined]
    return execute
