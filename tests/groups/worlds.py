"""Groups for tests: ranks as threads over real shared memory, and a store for ranks that are processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from hvdlite.core.array import Array
from hvdlite.core.kernel_files import anonymous_file
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.core.world import Hosts
from hvdlite.diagnostics.progress import Progress
from hvdlite.groups import reports
from hvdlite.groups.call import Call
from hvdlite.groups.carriers import RingCarrier
from hvdlite.groups.execution import GroupExecutor
from hvdlite.groups.group import Group
from hvdlite.groups.members import GroupMembers
from hvdlite.groups.messages import Messages
from hvdlite.groups.operation import Operation
from hvdlite.handoff.group_state import PATIENCE_SECONDS, GroupState
from hvdlite.memory.area import Area, area_bytes
from hvdlite.memory.fence import Fence, fence_file
from hvdlite.memory.rings import Rings, pair_bytes
from hvdlite.memory.shared import SharedMemory
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import Plane
from hvdlite.planes.loopback import LoopbackHub, LoopbackPlane
from hvdlite.planes.shm import ShmPlane

T = TypeVar("T")
HANGS_SECONDS = 30.0
HOSTS = pytest.mark.parametrize("one_host", [True, False], ids=["one host", "several hosts"])


class Reports(reports.Reports):
    """What a runtime hears of a group, written down."""

    def __init__(self) -> None:
        self.began_calls: list[str] = []
        self.ended_calls: list[str] = []
        self.suspected = 0
        self.failures: list[Exception] = []
        self.changes = 0
        self.progress = Progress()

    def clock(self) -> float:
        return time.monotonic()

    def began(self, name: str) -> None:
        self.began_calls.append(name)

    def ended(self, name: str, response: Response, begun: float, met: float) -> None:
        assert begun <= met
        self.ended_calls.append(name)

    def waits_changed(self) -> None:
        self.changes += 1

    def suspect(self) -> None:
        self.suspected += 1


class Neighbours:
    """Carries announcements between ranks of this process.

    Args:
        everybody: by rank.
    """

    def __init__(self, rank: int, everybody: dict[int, Neighbours]) -> None:
        self._rank, self._everybody = rank, everybody
        self._texts: list[tuple[int, bytes]] = []
        self._hear: Callable[[int, bytes], None] | None = None
        self._lock = threading.RLock()
        everybody[rank] = self

    def announce(self, to: Sequence[int], text: bytes) -> None:
        for rank in to:
            self._everybody[rank].take(self._rank, text)

    def take(self, source: int, text: bytes) -> None:
        with self._lock:
            self._texts.append((source, text))
        self._tell()

    def listen(self, hear: Callable[[int, bytes], None]) -> None:
        self._hear = hear
        self._tell()

    def _tell(self) -> None:
        while self._hear is not None:
            with self._lock:
                if not self._texts:
                    return
                source, text = self._texts.pop(0)
            self._hear(source, text)


def groups(size: int, *, one_host: bool = True, timeout: float = HANGS_SECONDS,
           patience: float = PATIENCE_SECONDS, fenced: bool = False, messages: bool = False) -> list[Group]:
    """Return the ends of a group of ranks in this process.

    Args:
        one_host: False lets them agree as ranks of several hosts do, and move tensors as the reference plane does.
        fenced: as on machines that reorder stores.
        messages: whether ranks can send and receive.
    """
    file, order, ends = anonymous_file(), fence_file(), []
    hub = LoopbackHub()
    neighbours: dict[int, Neighbours] = {}
    ranks = tuple(range(size))
    for rank in ranks:
        memory = SharedMemory(os.dup(file), rank, Fence(os.dup(order)) if fenced else None)
        members = GroupMembers.of("group of tests", ranks, rank, Hosts((ranks,)))
        heaps, told = memory.heaps(size), Reports()
        lines, pairs = memory.range(area_bytes(size), ranks, area_bytes(size)), memory.range(pair_bytes(size), ranks)
        assert lines is not None and pairs is not None
        area = Area(lines.bytes, rank, size)
        state = GroupState("id", ranks, area, told.waits_changed)
        plane: Plane
        if one_host:
            plane = ShmPlane(rank, memory, area.wake, slot=1 << 16, chunk=1 << 12, direct=256)
        else:
            plane = LoopbackPlane(rank, hub, lambda other, area=area: area.wake())  # type: ignore[misc]
        plane.add_process_set(0, ranks)
        others = {other: other for other in ranks if other != rank}
        mail = None
        if messages:
            carrier = RingCarrier(Rings(pairs.bytes.data, rank, heaps, 1 << 16), area, others)
            mail = Messages(members, state, dict.fromkeys(others, carrier), told.progress, patience)
        near: Any = None if one_host else Neighbours(rank, neighbours)
        execution = GroupExecutor(members, plane, state, told, mail, link=near, patience=patience)
        ends.append(Group(members, timeout, state, execution, mail, told, report_error=told.failures.append))
    os.close(file)
    os.close(order)
    return ends


def reports_of(group: Group) -> Reports:
    """Return what a runtime has heard of a group of `groups`."""
    told = group._reports
    assert isinstance(told, Reports)
    return told


def play(ends: Sequence[Group], step: Callable[[Group], T], *, closes: bool = True) -> list[T]:
    """Let each rank run `step` in a thread of its own; return the results."""
    results: list[Any] = [None] * len(ends)
    failures: list[BaseException] = []

    def body(end: Group) -> None:
        try:
            results[end.rank] = step(end)
        except BaseException as error:
            failures.append(error)
            end.abort("its test has failed")
        finally:
            if closes:
                end.close()

    workers = [threading.Thread(target=body, args=(end,), daemon=True) for end in ends]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(HANGS_SECONDS)
    if failures:
        raise failures[0]
    assert not any(worker.is_alive() for worker in workers), "ranks hang"
    return results


def result_of(call: Call) -> None:
    """Wait for a call, and raise its error."""
    assert call.wait(HANGS_SECONDS)
    if call.error is not None:
        raise call.error


def allreduce(values: Array, output: Array | None = None, op: ReduceOp = ReduceOp.SUM) -> Operation:
    return Operation(collective=Collective.ALLREDUCE, agreed=f"all_reduce({op.name}, {values.dtype}[{values.size}])",
                     dtype=str(values.dtype), sources=[values], outputs=[values if output is None else output], op=op)


def barrier() -> Operation:
    return Operation(collective=Collective.BARRIER, agreed="barrier()", dtype="uint8")


def allgather(values: Array, output: Array, size: int) -> Operation:
    return Operation(collective=Collective.ALLGATHER, agreed=f"all_gather({values.dtype}[{values.size}])",
                     dtype=str(values.dtype), sources=[values], outputs=[output], rows=(values.size,) * size)


def sums(group: Group, value: float, elements: int = 4) -> float:
    """Sum a value over the ranks."""
    values = np.full(elements, value, np.float32)
    result_of(group.start([allreduce(values)], blocking=True))
    assert (values == values[0]).all()
    return float(values[0])


class FileStore:
    """A store of `join_group`: a file for each key."""

    seconds, host, where = 2 * HANGS_SECONDS, "", ""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(exist_ok=True)

    def put(self, key: str, value: bytes) -> None:
        path = self._path(key)
        new = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        new.write_bytes(value)
        new.replace(path)

    def get(self, key: str, seconds: float) -> bytes | None:
        until = time.monotonic() + seconds
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() >= until:
                    return None
                time.sleep(0.002)

    def forget(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")
