"""Memory of learned buckets, registered with NCCL as symmetric windows of a communicator, where NCCL has them.

Theory of operation
- In a symmetric window, NCCL uses the memory of other ranks directly, and reduces in NVLink's switches. All ranks must use
  windows alike. So they agree twice: each must have memory before any of them registers it, because NCCL registers together
  with all ranks and cannot be interrupted; and each must have registered it. If a rank did not, all of them use ordinary
  memory instead, and do not try again for this process set. Memory that was not registered is freed before that.
- Windows are never deregistered. NCCL places each one at an offset that a rank computes from its own history of
  registrations, and reads the memory of other ranks at that offset. Ranks would have to deregister in the same order, but
  they drop references to memory when they like. So a window lasts as long as its communicator, and its memory, too. When
  too much of it is unused, no more windows are made for the process set.
- With memory in a window, a collective must have memory at the same offset of it on all ranks. So it is with a bucket. A
  script's tensor may be a slice of a bucket on one rank and not on another one, so NCCL gets a copy of such tensors.
- Aborting a communicator ends its windows. Their memory is freed then, or when nobody refers to it any more (gradients that
  the script keeps).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hvdlite.core.array import GPU_ALIGNMENT
from hvdlite.core.device import DeviceArray
from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.types import Collective
from hvdlite.planes.base import OobChannel, Plan, WaitUntil
from hvdlite.planes.launch_thread import LaunchThread
from hvdlite.planes.nccl.api import WINDOW_ALIGNMENT
from hvdlite.planes.nccl.collectives import StagingBuffer
from hvdlite.planes.nccl.device import Device
from hvdlite.planes.nccl.watcher import CommunicatorRef

_log = logging.getLogger("hvdlite")

_SLOW_SECONDS: Final = 30.0
"""After which a registration that does not return is reported."""


class WindowMemory:
    """Memory of a window, and the only reference to it: it is retired when nobody refers to this any more."""

    __slots__ = ("_pid", "_retire", "pointer")

    def __init__(self, pointer: int, retire: Callable[[int], None]) -> None:
        self.pointer, self._retire, self._pid = pointer, retire, os.getpid()

    def __del__(self) -> None:
        if self._pid == os.getpid():  # a forked child must not call CUDA
            self._retire(self.pointer)


class Windows:
    """Makes and ends the windows of a rank.

    Args:
        reclaim: lets the framework give back that many bytes that it keeps unused; returns whether it may have.
        blocking: whether calls of the communicators block.

    Attributes:
        registered: the length of each window and whose it is, by address.
        retired: the addresses of memory that nobody refers to any more.
    """

    def __init__(self, rank: int, device: Device, oob: OobChannel, reclaim: Callable[[int], bool], *,
                 blocking: bool) -> None:
        self._rank, self._device, self._oob, self._reclaim, self._blocking = rank, device, oob, reclaim, blocking
        self._attempts: dict[int, int] = {}  # by process set
        self._refused: set[int] = set()  # process sets
        self._closed = False
        self._unused: set[int] = set()  # addresses of windows whose memory nobody refers to any more
        self.registered: dict[int, tuple[int, CommunicatorRef]] = {}
        self.retired: deque[int] = deque()

    def memory(self, process_set_id: int, ref: CommunicatorRef, nbytes: int, thread: LaunchThread,
               wait_until: WaitUntil) -> DeviceArray | None:
        """Return memory that is registered as a window of the communicator on all its ranks, or None on all of them.

        Raises:
            HorovodInternalError: if a registration has failed, and the communicator with it.
        """
        if process_set_id in self._refused:
            return None
        attempt = self._attempts[process_set_id] = self._attempts.get(process_set_id, 0) + 1
        owner, problem = None, self._device.windows_missing()
        if not problem:
            try:
                owner = thread.run(lambda: self._allocated(nbytes, ref), wait_until)
            except self._device.failure as error:
                problem = f"no memory: {self._device.explain(None, error)}"
            else:
                problem = "" if owner is not None else "windows that are not used any more take too much memory"
        refusal = self._agree(f"nccl.{process_set_id}.memory.{attempt}", ref, problem, wait_until)
        if not refusal:
            assert owner is not None
            try:
                if not thread.run(functools.partial(self._register, owner.pointer, nbytes, ref), wait_until):
                    problem = "NCCL does not register it"
            except self._device.failure as error:
                problem = self._device.explain(ref.communicator, error)
                if not self._blocking:  # the error remains that of the communicator
                    raise HorovodInternalError(
                        f"rank {self._rank}: NCCL cannot register {nbytes} bytes of GPU {self._device.index} as a symmetric "
                        f"window of ranks {list(ref.ranks)}: {problem}; HVDLITE_NCCL_WINDOWS=0 does without") from error
            refusal = self._agree(f"nccl.{process_set_id}.window.{attempt}", ref, problem, wait_until)
        if refusal:
            self._refused.add(process_set_id)
            _log.info("rank %d: buckets of ranks %s are not registered with NCCL: %s", self._rank, list(ref.ranks), refusal)
            owner = None
            thread.run(self.release, wait_until)  # before the memory that is used instead is allocated
            return None
        assert owner is not None
        _log.info("rank %d: %d bytes for buckets of ranks %s are registered with NCCL", self._rank, nbytes, list(ref.ranks))
        return DeviceArray(owner.pointer, (nbytes,), np.dtype(np.uint8), self._device.index, owner)

    def outside(self, plan: Plan, ref: CommunicatorRef,
                staging: StagingBuffer) -> tuple[Plan, list[tuple[DeviceArray, DeviceArray]]]:
        """Return a plan with copies of the arrays that are in windows, and for each output among them the copy and itself.

        Launches the copies of sources.

        Args:
            plan: not of a bucket.
            staging: nothing else uses it.
        """
        if plan.response.collective is Collective.ALLREDUCE and len(plan.sources) > 1:
            return plan, []  # NCCL gets them as one, in staging memory
        ranges = [(begin, begin + length) for begin, (length, owner) in list(self.registered.items()) if owner is ref]
        inside: dict[tuple[int, int], int] = {}  # the offset of the copy, by address and length
        total = 0
        for array in (*plan.sources, *plan.outputs):
            if isinstance(array, DeviceArray) and (array.pointer, array.nbytes) not in inside and any(
                    begin <= array.pointer < end for begin, end in ranges):
                inside[array.pointer, array.nbytes] = total
                total += -(-array.nbytes // GPU_ALIGNMENT) * GPU_ALIGNMENT
        if not inside:
            return plan, []
        base, device = staging.get(total), self._device

        def copied(array: Any) -> Any:
            offset = inside.get((array.pointer, array.nbytes)) if isinstance(array, DeviceArray) else None
            return array if offset is None else dataclasses.replace(array, pointer=base + offset)
        sources, outputs = list(map(copied, plan.sources)), list(map(copied, plan.outputs))
        for array, copy in zip(plan.sources, sources, strict=True):
            if copy is not array:
                device.copy(array.pointer, copy.pointer, array.nbytes, device.stream)
        back = [(copy, array) for array, copy in zip(plan.outputs, outputs, strict=True) if copy is not array]
        return dataclasses.replace(plan, sources=sources, outputs=outputs), back

    def release(self) -> None:
        """Free the memory that nobody refers to any more, that of windows when their communicator has been aborted."""
        while self.retired:
            try:
                pointer = self.retired.popleft()
            except IndexError:  # another thread has taken it
                return
            _, ref = self.registered.get(pointer, (0, None))
            if ref is None:
                self._free(pointer)
            else:
                self._unused.add(pointer)
                ref.call_after(functools.partial(self._free, pointer))

    def close(self) -> None:
        """Free the memory that nobody refers to now, and other memory when nobody does; all communicators have ended."""
        self._closed = True
        self.release()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _free(self, pointer: int) -> None:
        self.registered.pop(pointer, None)
        self._unused.discard(pointer)
        try:
            self._device.free_window(pointer)
        except self._device.failure as error:  # the GPU has failed, or the process ends
            _log.debug("memory of a window is not freed: %s", error)

    def _allocated(self, nbytes: int, ref: CommunicatorRef) -> WindowMemory | None:
        """Return new memory; None if more memory of windows is unused than used, and than a window needs."""
        self.release()
        rounded = -(-nbytes // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
        lengths = {pointer: length for pointer, (length, owner) in list(self.registered.items()) if owner is ref}
        unused = sum(length for pointer, length in lengths.items() if pointer in self._unused)
        if unused > max(sum(lengths.values()) - unused, rounded):
            return None
        try:
            pointer = self._device.allocate_window(rounded)
        except self._device.failure:  # NCCL does not tell a lack of memory from other errors
            if not self._reclaim(rounded):
                raise
            pointer = self._device.allocate_window(rounded)
        return WindowMemory(pointer, self._retire)

    def _register(self, pointer: int, nbytes: int, ref: CommunicatorRef) -> bool:
        rounded = -(-nbytes // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
        slow = threading.Timer(_SLOW_SECONDS, _log.warning, (
            "rank %d: NCCL has not registered a symmetric window for %.0f s; HVDLITE_NCCL_WINDOWS=0 does without",
            self._rank, _SLOW_SECONDS))
        slow.daemon = True
        slow.start()
        try:
            handle = self._device.register_window(ref.communicator, pointer, rounded)
        finally:
            slow.cancel()
        if handle:
            self.registered[pointer] = rounded, ref
        return bool(handle)

    def _agree(self, label: str, ref: CommunicatorRef, problem: str, wait_until: WaitUntil) -> str:
        """Return the first rank's problem; "" if no rank has one."""
        def answer(texts: list[bytes]) -> bytes:
            return next((f"rank {rank}: {text.decode()}".encode()
                         for rank, text in zip(ref.ranks, texts, strict=True) if text), b"")
        return self._oob.gather_and_broadcast(label, ref.ranks, problem.encode(), answer, wait_until).decode()

    def _retire(self, pointer: int) -> None:
        self.retired.append(pointer)
        if self._closed:
            self.release()
