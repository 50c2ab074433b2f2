"""The interface of data planes: a plane executes plans, which all ranks execute in the same order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.device import AnyArray, Completion, DeviceAccess, DeviceArray
from hvdlite.core.errors import HorovodInternalError
from hvdlite.negotiation.messages import GpuProgress, OverdueWork, Response

CHUNK_KNOB: Final = "shm_chunk"
"""The knob for the bytes per NumPy call of every host plane; HVDLITE_SHM_CHUNK is named after the first one."""


class WaitUntil(Protocol):
    """Blocks a plane until a condition holds; raises the job's error if the job ends first."""

    def __call__(self, predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        """Return when the predicate holds. It is evaluated after every event: a wake-up or a message.

        Args:
            poll_interval: if not 0, evaluate the predicate also at this interval in seconds, for libraries that make
                progress only when they are called; continuously while the script is blocked in a wait.
        """


class OobTexts(Protocol):
    """Out-of-band texts by which planes of different ranks connect. Each label is used once."""

    def publish(self, label: str, text: bytes) -> None:
        """Make this rank's text available to `fetch` on other ranks."""

    def fetch(self, label: str, sender: int, wait_until: WaitUntil, is_cancelled: Callable[[], bool] = ...) -> bytes:
        """Return the text that another rank publishes; callable from any thread.

        Args:
            wait_until: used if this is the background thread.
            is_cancelled: for other threads: whether to give up; see `look`. By default they never do.

        Raises:
            HorovodInternalError: when the job ends first, or it is cancelled.
        """

    def look(self) -> None:
        """Let the threads in `fetch` look whether they are cancelled; callable from any thread."""

    def withdraw(self, label: str) -> None:
        """Remove this rank's text; no rank fetches it any more."""


class OobChannel(OobTexts, Protocol):
    """Out-of-band texts and answers to them."""

    def gather_and_broadcast(self, label: str, ranks: Sequence[int], text: bytes, answer: Callable[[list[bytes]], bytes],
                             wait_until: WaitUntil) -> bytes:
        """Gather the ranks' texts on the first of them, and return its answer on all of them; all ranks call this.

        Args:
            answer: computes the answer from all texts, in rank order; called on the first rank only.
        """


@dataclasses.dataclass(frozen=True)
class AlltoallSplits:
    """The numbers of rows that one rank sends and receives in an alltoall; by index in the process set."""

    send_rows: tuple[int, ...]  # rows that this rank sends to each rank
    recv_rows: tuple[int, ...]  # rows that this rank receives from each rank
    source_starts: tuple[int, ...]  # index of the first of these rows in the sender's tensor


@dataclasses.dataclass(frozen=True)
class FusionBuffer:
    """Memory for buckets, allocated by a plane, which reduces in place.

    Attributes:
        own: this rank's bytes, aligned to 64, or to 256 on a GPU.
        slots: every rank's bytes if the plane shares them, else empty.
    """

    own: AnyArray
    slots: tuple[Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class BufferSlice:
    """The byte range of one bucket in a fusion buffer."""

    buffer: FusionBuffer
    begin: int
    end: int

    def slots(self, dtype: np.dtype[Any]) -> list[Array]:
        """Return the bucket in each rank's memory, where the plane shares it."""
        return [slot[self.begin:self.end].view(dtype) for slot in self.buffer.slots]


class Plan(msgspec.Struct, frozen=True, eq=False):
    """One response with this rank's memory. A rank that has joined participates without sources and outputs.

    All memory is flat and contiguous. Allreduce, broadcast and allgather have one output for each source, possibly the same
    memory. Reducescatter and scatter output this rank's rows (`response.rows`). Reduce and gather have an output on the root
    only (None on other ranks). The source of an alltoall holds the rows for each rank in rank order (`splits.send_rows`),
    its output the rows from each rank.

    With `buffer_slice`, the only source and output is that slice of a fusion buffer on every rank, and every rank
    contributes.

    `sources[i]` is None if this rank does not contribute to a reduction. A broadcast copies the root's source to all
    outputs.
    """

    sequence: int  # counts the plans of this process set; equal on all its ranks
    ranks: tuple[int, ...]  # the members of the process set, ascending
    response: Response
    sources: Sequence[Any]  # Array | None for a host plane; DeviceArray | None for a GPU plane; likewise below
    outputs: Sequence[Any]
    buffer_slice: BufferSlice | None = None
    splits: AlltoallSplits | None = None  # alltoall only


class Plane(Protocol):
    """Transfers and reduces host memory between ranks. A new plane implements this interface."""

    name: str

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        """Carry out `plan`; when it returns, the outputs hold the result and the sources may be reused."""

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        """Make a process set usable. All ranks of the plane call this in the same order, members or not.

        Raises:
            MemoryError: like `fusion_buffer`.
        """

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        """Release a process set after its last plan; all its members call this."""

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...]) -> FusionBuffer | None:
        """Return new zeroed memory for buckets of the process set of `ranks`; None on other ranks.

        All ranks of the plane make the same calls in the same order.

        Raises:
            MemoryError: if there is not enough memory, with the requested size.
        """

    def staging_bytes(self) -> int:
        """Return how much memory this rank keeps for the plane's work, in bytes, beside fusion buffers."""

    def tune(self, settings: Mapping[str, int]) -> None:
        """Apply new values of knobs that concern this plane; all ranks do so between the same plans."""

    def close(self) -> None:
        """Release the plane's memory; fusion buffers last as long as their views."""


class DevicePlane(DeviceAccess, Protocol):
    """Like `Plane`, for tensors on GPUs: launches work without waiting for it."""

    name: str

    def enter_thread(self) -> None:
        """Make the GPU the current device of the calling thread, the background thread, for good."""

    def set_handlers(self, failed: Callable[[Exception], None], overdue: Callable[[OverdueWork], None],
                     times: Sequence[float]) -> None:
        """Set the functions that are called, from any thread; before the first tensor.

        Args:
            failed: called with an error in launched work.
            overdue: called with launched work that takes long.
            times: in seconds; `overdue` is called once at each of them. 0 is never.
        """

    def progress(self) -> tuple[GpuProgress, ...]:
        """Return how far the GPU is in the plans of each process set."""

    def execute(self, plan: Plan, wait_until: WaitUntil) -> Completion:
        """Launch `plan`. Sources must be kept, and outputs are not valid, until the returned completion is done."""

    def add_process_set(self, process_set_id: int, ranks: tuple[int, ...]) -> None:
        """Like `Plane.add_process_set`."""

    def remove_process_set(self, process_set_id: int, wait_until: WaitUntil) -> None:
        """Like `Plane.remove_process_set`."""

    def fusion_buffer(self, nbytes: int, ranks: tuple[int, ...], wait_until: WaitUntil) -> FusionBuffer | None:
        """Like `Plane.fusion_buffer`."""

    def row_major(self, array: DeviceArray) -> DeviceArray:
        """Return a row-major copy of an array; its values are valid for plans executed from now on."""

    def close(self, failure: HorovodInternalError | None) -> None:
        """Close all connections.

        Args:
            failure: the error that ends the job early: work in progress is not waited for, and waits for it raise this.
        """
