"""The runtimes of ranks that are threads of one process."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from typing import TypeAlias

from hvdlite.control.star import ControlPlane, Event
from hvdlite.core.config import Config
from hvdlite.core.world import World
from hvdlite.engine.connections import Connections
from hvdlite.engine.oob import OobChannel
from hvdlite.negotiation.messages import Decision, DirectMessage, RankReport, Report
from hvdlite.planes.arithmetic import Casts
from hvdlite.planes.base import Plane
from hvdlite.planes.loopback import LoopbackHub, LoopbackPlane
from hvdlite.runtime.assemble import DevicePlaneMaker, Learned, coordinator_for
from hvdlite.runtime.runtime import Runtime

PlaneWrapper = Callable[[int, Plane], Plane]
_Events: TypeAlias = "queue.SimpleQueue[Event | None]"
"""One rank's incoming events and wake-ups (None): a queue into which a finalizer may put in the middle of a put."""


def assemble_threads(size: int, config: Config, wrap: PlaneWrapper = lambda rank, plane: plane,
                     casts: Casts | None = None, devices: DevicePlaneMaker | None = None, *,
                     epoch: int = 0, learned: Learned | None = None) -> list[Runtime]:
    """Return the runtimes of `size` ranks that live in this process, not yet started; `wrap` may inject faults."""
    hub = LoopbackHub()
    casts = casts or Casts.of_numpy()
    runtimes = []
    for rank, control in enumerate(InprocControl.star(size)):
        world = World(rank, size, rank, size, epoch=epoch)
        plane = wrap(rank, LoopbackPlane(rank, hub, control.wake_rank, casts))
        oob = OobChannel(rank)
        gpu_plane = None if devices is None else devices(rank, oob, control.wake)
        connections = Connections(control, plane, oob, gpu_plane)
        runtimes.append(Runtime(world, config, connections, coordinator_for(world, config, learned)))
    return runtimes


class InprocControl(ControlPlane):
    """A control plane between threads of a process: no sockets, no encoding."""

    parent = 0
    children: frozenset[int] = frozenset()

    def __init__(self, rank: int, queues: Sequence[_Events]) -> None:
        self._rank = rank
        self._queues = queues

    @classmethod
    def star(cls, size: int) -> list[InprocControl]:
        """Return the connected control planes of `size` ranks."""
        queues: list[_Events] = [queue.SimpleQueue() for _ in range(size)]
        return [cls(rank, queues) for rank in range(size)]

    def send_report(self, report: Report) -> None:
        self._queues[0].put(RankReport(self._rank, report))

    def send_decision(self, decision: Decision) -> None:
        for other in self._queues[1:]:
            other.put(decision)

    def send_direct_messages(self, messages: Sequence[DirectMessage]) -> None:
        for message in messages:
            if message.rank:
                self._queues[message.rank].put(message)

    def wait(self, timeout: float | None, spin: float = 0.0) -> list[Event]:
        del spin  # the others need this process's GIL
        own, taken = self._queues[self._rank], []
        with contextlib.suppress(queue.Empty):
            taken.append(own.get(timeout=timeout) if timeout != 0 else own.get_nowait())
            while True:
                taken.append(own.get_nowait())
        return [event for event in taken if event is not None]

    def wake(self) -> None:
        self.wake_rank(self._rank)

    def wake_rank(self, rank: int) -> None:
        self._queues[rank].put(None)

    def flush(self, timeout: float) -> None:
        del timeout  # an event is delivered immediately

    def close_in_child(self) -> None:
        pass  # there are no descriptors

    def close(self) -> None:
        pass
