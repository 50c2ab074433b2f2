"""The data planes' contract: execute a plan that all ranks execute in the same order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvdlite.core.array import Array
from hvdlite.core.device import AnyArray, Completion, DeviceAccess, DeviceArray
from hvdlite.core.errors import HorovodInternalError
from hvdlite.negotiation.messages import Response


class WaitUntil(Protocol):
    """Blocks a plane; raises the job's error when the job ends first."""

    def __call__(self, predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        """Return when the predicate holds. It is looked at when something happened: a bell, a message.

        Args:
            poll_interval: look every so many seconds beside that,
            for engines that make progress only when they are looked at;
                without sleeping while the script is blocked in a wait. 0 is not at all.
        """

class Notes(Protocol):
    """How planes of different ranks exchange short texts when they connect. A label is used once."""

    def publish(self, label: str, text: bytes) -> None:
        """Let others `fetch` this rank's text."""

    def fetch(self, label: str, sender: int, wait_until: WaitUntil) -> bytes:
        """Return what another rank publishes; from any thread, and `wait_until` is used in the runtime's only.

        Raises:
            HorovodInternalError: when the job ends first.
        """

    def withdraw(self, label: str) -> None:
        """Nobody will fetch this rank's text any more."""

    def consult(self, label: str, ranks: Sequence[int], text: bytes, answer: Callable[[list[bytes]], bytes],
                wait_until: WaitUntil) -> bytes:
        """Give a text to the first of some ranks, all of which make this call, and return its answer to all of them.

        Args:
            answer: makes it of everybody's texts, in the ranks' order; called on the first rank only.
        """


@dataclasses.dataclass(frozen=True)
class AlltoallSplits:
    """The numbers of rows that one rank sends and receives in an alltoall; by index in the process set."""

    send_rows: tuple[int, ...]  # rows that this rank sends to each rank
    recv_rows: tuple[int, ...]  # rows that this rank receives from each rank
    source_starts: tuple[int, ...]  # index of the first of these rows in the sender's tensor


@dataclasses.dataclass(frozen=True)
class FusionBuffer:
    """Memory for buckets, made by a plane so that it can reduce in it.

    Attributes:
        own: this rank's bytes, aligned to 64, or to 256 on a GPU.
        slots: every rank's bytes where the plane shares them, else empty.
    """

    own: AnyArray
    slots: tuple[Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class BufferSlice:
    """A range of a fusion buffer, in bytes: one bucket."""

    buffer: FusionBuffer
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """One response with this rank's memory; no sources and no outputs when this rank has joined and only helps.

    Memory by collective, all flat and contiguous: the reductions, broadcast and gathers have one output for each source,
    possibly the same memory; reducescatter and scatter have this rank's rows (`response.rows`) as output; reduce and gather
    have an output on the root only (elsewhere None); alltoall's source holds the rows for each rank one after the other
    (`splits.send_rows`), its output the rows from each.

    `buffer_slice` says that the one source and output is that slice of a fusion buffer, on every rank,
    and every rank contributes.

    `sources[i]` is None when this rank does not contribute to a reduction. Broadcast: the root's source is what all outputs
    get.
    """

    sequence: int  # counts the plans of this process set, equal on all its ranks
    ranks: tuple[int, ...]  # the members of the process set, ascending
    response: Response
    sources: Sequence[Any]  # Array | None on the host; DeviceArray | None for a plane of GPUs; likewise below
    outputs: Sequence[Any]
    buffer_slice: BufferSlice | None = None
    splits: AlltoallSplits | None = None  # alltoall only


class Plane(Protocol):
    """Moves and combines bytes between the ranks."""

    name: str

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        """Carry out `plan`; when it returns, the outputs hold the result and the sources may be reused."""

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        """Make process set `process_set_id` usable. All ranks of the plane do so, in the same order, members or not.

        Raises:
            MemoryError: like `fusion_buffer`.
        """

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        """Give up a process set after its last plan; all its members do so."""

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        """Return new zeroed memory for buckets of the process set of `ranks`; None on other ranks.

        All ranks of the plane ask for the same in the same order.

        Raises:
            MemoryError: when there is not enough; saying how much was asked for.
        """

    def tune(self, settings: Mapping[str, int]) -> None:
        """Take over new values of knobs, those that concern it; all ranks do so between the same plans."""

    def close(self) -> None:
        """Release the plane's memory; fusion buffers last as long as their views."""


class DevicePlane(DeviceAccess, Protocol):
    """Like `Plane`, for tensors on GPUs: it launches work, and does not wait for it."""

    name: str

    def report_to(self, report: Callable[[Exception], None]) -> None:
        """Tell `report` of an error in work that was launched, from any thread."""

    def execute(self, plan: Plan, wait_until: WaitUntil) -> Completion:
        """Launch `plan`; the outputs hold the result after what is returned, and the sources must be kept until then."""

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        """Like `Plane.add_process_set`."""

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        """Like `Plane.remove_process_set`."""

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...], wait_until: WaitUntil) -> FusionBuffer | None:
        """Like `Plane.fusion_buffer`."""

    def row_major(self, place: DeviceArray) -> DeviceArray:
        """Return a row-major copy of an array; its values are there for plans that are executed from now on."""

    def close(self, failure: HorovodInternalError | None) -> None:
        """End all connections.

        Args:
            failure: why the job ends early: work under way is not waited for, and whoever waits for it gets this.
        """
