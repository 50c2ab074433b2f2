"""The communicators of a rank, by process set: made together with the set's other ranks, and aborted in the end."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from hvdlite.core.errors import HorovodInternalError, PeerLostError
from hvdlite.planes.base import OobChannel, WaitUntil
from hvdlite.planes.launch_thread import LaunchThread
from hvdlite.planes.nccl import collectives
from hvdlite.planes.nccl.collectives import DTYPES
from hvdlite.planes.nccl.cupy_device import Communicator, CupyDevice, StagingBuffer
from hvdlite.planes.nccl.library import version_text

_PEER_STATUSES: Final = (2, 6)
"""ncclSystemError and ncclRemoteError, which NCCL also returns when another rank is gone."""

ABORT_SECONDS: Final = 10.0
"""Time for aborts of communicators to return."""
_SEVERAL_ON_ONE: Final = 23000
"""The version from which NCCL accepts several ranks on one GPU."""

_log = logging.getLogger("hvdlite")


class PeerInfo(msgspec.Struct, frozen=True):
    """One rank's host, GPU, NCCL version and kernels."""

    host: str
    gpu: str  # from `CupyDevice.bus_id`
    uuid: str  # from `CupyDevice.uuid`
    version: int  # the code of the NCCL version
    has_kernels: bool = True  # from `CupyDevice.has_kernels`; ranks use kernels only where all have them
    unique_id: bytes = b""  # the communicator's id; set by the first rank only


_PEER_INFO: Final = msgspec.msgpack.Decoder(PeerInfo)


class _Answer(msgspec.Struct, frozen=True):
    """The reply of the first rank of a communicator to all of them."""

    problem: str = ""  # why there can be none
    unique_id: bytes = b""
    has_kernels: bool = False  # whether all ranks have them


_ANSWER: Final = msgspec.msgpack.Decoder(_Answer)


class CommunicatorRef:
    """A reference that prevents garbage collection of a communicator: CuPy would call `ncclCommDestroy`, which waits for
    other ranks.

    Args:
        ranks: the ranks of the communicator.
        has_kernels: whether kernels work on all of them.
    """

    def __init__(self, communicator: Communicator, ranks: tuple[int, ...] = (), *, has_kernels: bool = True) -> None:
        self.communicator, self.ranks, self.has_kernels = communicator, ranks, has_kernels
        self._is_ending = False
        self._lock = threading.Lock()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))

    def end(self) -> None:
        """Abort the communicator, and permit its garbage collection; a second call does nothing."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        self.communicator.abort()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self.communicator))


class Communicators:
    """See above. The background thread calls it; what NCCL may block in runs on the launch thread.

    Attributes:
        refs: by process set.

    Args:
        host: an identifier of this rank's host.
        oob: carries the ranks' `PeerInfo`.
        staging: for the first collective of a communicator.
        shared_gpu: whether several ranks may share a GPU.
    """

    def __init__(self, rank: int, host: str, oob: OobChannel, thread: LaunchThread, device: CupyDevice,
                 staging: StagingBuffer, *, shared_gpu: bool) -> None:
        self.refs: dict[int, CommunicatorRef] = {}
        self._rank, self._host, self._oob, self._thread = rank, host, oob, thread
        self._device, self._staging, self._shared_gpu = device, staging, shared_gpu
        self._connecting: CommunicatorRef | None = None  # one that no process set has yet
        self._closing = False

    def create(self, process_set_id: int, ranks: tuple[int, ...], wait_until: WaitUntil) -> None:
        """Create the communicator of a process set, unless there is one, together with all its ranks.

        Raises:
            HorovodInternalError: on all ranks, if their GPUs do not fit.
        """
        if process_set_id in self.refs:
            return
        device, mine = self._device, ranks.index(self._rank)
        unique_id = self._thread.run(device.unique_id, wait_until) if mine == 0 else b""
        has_kernels = self._thread.run(device.has_kernels, wait_until)
        text = msgspec.msgpack.encode(PeerInfo(
            self._host, device.bus_id(), device.uuid(), device.version, has_kernels, unique_id))
        answer = _ANSWER.decode(self._oob.gather_and_broadcast(f"nccl.{process_set_id}", ranks, text,
                                                               functools.partial(self._check_peers, ranks), wait_until))
        if answer.problem:
            raise HorovodInternalError(answer.problem)
        self.refs[process_set_id] = self._thread.run(lambda: self._make(ranks, answer), wait_until)
        self._connecting = None

    def check(self) -> None:
        """Raise an asynchronous error of a communicator."""
        device = self._device
        for ref in list(self.refs.values()):
            try:
                ref.communicator.check_async_error()
            except device.failure as error:
                what = f"work under way between ranks {list(ref.ranks)}"
                raise nccl_error(self._rank, device, ref.communicator, what, error) from error

    def close(self) -> list[CommunicatorRef]:
        """Make no more of them; return those that are to be aborted."""
        refs, self.refs, self._closing = list(self.refs.values()), {}, True
        connecting = self._connecting
        return refs if connecting is None else [*refs, connecting]

    def _check_peers(self, ranks: tuple[int, ...], texts: Sequence[bytes]) -> bytes:
        """Return the answer to the ranks of a communicator; called on its first rank."""
        peers = {rank: _PEER_INFO.decode(text) for rank, text in zip(ranks, texts, strict=True)}
        try:
            check_peers(peers, shared=self._shared_gpu)
        except HorovodInternalError as error:
            return msgspec.msgpack.encode(_Answer(str(error)))
        have_kernels = all(each.has_kernels for each in peers.values())
        return msgspec.msgpack.encode(_Answer("", peers[ranks[0]].unique_id, have_kernels))

    def _make(self, ranks: tuple[int, ...], answer: _Answer) -> CommunicatorRef:
        device, what, communicator = self._device, f"making a communicator of ranks {list(ranks)}", None
        try:
            communicator = device.communicator(len(ranks), answer.unique_id, ranks.index(self._rank))
            self._connecting = ref = CommunicatorRef(communicator, ranks, has_kernels=answer.has_kernels)
            if self._closing:  # the world was lost meanwhile, and nobody else has the communicator
                ref.end()
                raise HorovodInternalError(f"{what} was given up")
            # The first call connects the ranks, which blocks; better here than in a training step.
            warm = self._staging.get(4096)
            communicator.allReduce(warm, warm, 1024, DTYPES["float32"], collectives.SUM, device.stream)
        except device.failure as error:
            raise nccl_error(self._rank, device, communicator, what, error) from error
        _log.info("rank %d: %s on GPU %d", self._rank, what, device.index)
        return ref


def check_peers(ranks: Mapping[int, PeerInfo], *, shared: bool) -> None:
    """Check that these ranks can create a communicator; the result is the same on all of them.

    Args:
        shared: whether several ranks may use one GPU.

    Raises:
        HorovodInternalError: naming the ranks and both values.
    """
    first, *others = sorted(ranks)
    for rank in others:
        if ranks[rank].version != ranks[first].version:
            raise HorovodInternalError(f"rank {first} has NCCL {version_text(ranks[first].version)} and rank {rank} has "
                                       f"{version_text(ranks[rank].version)}: install one version everywhere")
    users: dict[tuple[str, str, str], int] = {}
    owners: dict[tuple[str, str], int] = {}
    for rank in sorted(ranks) if not shared else ():
        mine = ranks[rank]
        other = users.setdefault((mine.host, mine.gpu, mine.uuid), rank)
        if other != rank:
            raise HorovodInternalError(
                f"ranks {other} and {rank} use the same GPU ({mine.gpu}): call "
                "torch.cuda.set_device(hvd.local_rank()) after init(), before anything is put on a GPU; start at most as "
                "many ranks a host as it has GPUs. For tests, HVDLITE_SHARED_GPU=1 allows it (NCCL before 2.30 also needs "
                "another NCCL_HOSTID for each rank)")
        other = owners.setdefault((mine.host, mine.gpu), rank)
        if other != rank and mine.version < _SEVERAL_ON_ONE:
            raise HorovodInternalError(
                f"ranks {other} and {rank} use slices (MIG) of one GPU ({mine.gpu}), which NCCL "
                f"{version_text(mine.version)} refuses: use NCCL 2.30 or newer, or another GPU for each rank")


def abort(refs: Sequence[CommunicatorRef], device: CupyDevice, timeout: float) -> int:
    """Abort communicators, each in its own thread: aborting them one after the other can hang (nccl issue 1013).

    Return the number of aborts that have not returned within `timeout` seconds; their threads are abandoned.
    """
    def end(ref: CommunicatorRef) -> None:
        try:
            device.make_current()
            ref.end()
        except Exception as error:
            _log.warning("aborting a communicator failed: %s", device.explain(None, error))

    threads = [threading.Thread(target=end, args=(ref,), name="hvdlite-nccl-abort", daemon=True) for ref in refs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)


def nccl_error(rank: int, device: CupyDevice, communicator: Any, what: str, error: Exception) -> HorovodInternalError:
    """Return the error that a rank raises when NCCL or CUDA fails in `what`; `PeerLostError` if it may be another rank's."""
    if isinstance(error, MemoryError):
        return HorovodInternalError(f"rank {rank}: out of memory in {what}: {error}")
    if not isinstance(error, (device.failure[0], KeyError)):
        return HorovodInternalError(f"rank {rank}: CUDA failed in {what} on GPU {device.index}: {error}")
    text = f"rank {rank}: NCCL failed in {what} on GPU {device.index}: {device.explain(communicator, error)}"
    if getattr(error, "status", 0) in _PEER_STATUSES:
        return PeerLostError(f"{text}. A rank has died, or the network between GPUs has failed; NCCL_DEBUG=INFO shows more")
    return HorovodInternalError(f"{text}; NCCL_DEBUG=INFO shows more")
