"""The communicators of a rank, by process set: made together with the set's other ranks, and aborted in the end."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.planes.base import OobChannel, WaitUntil
from hvdlite.planes.launch_thread import LaunchThread
from hvdlite.planes.nccl import collectives
from hvdlite.planes.nccl.api import NcclError
from hvdlite.planes.nccl.collectives import DTYPES, StagingBuffer
from hvdlite.planes.nccl.device import Communicator, Device
from hvdlite.planes.nccl.peer_info import PeerInfo, check_peers
from hvdlite.planes.nccl.shrinking import SHRINK_SECONDS, CommunicatorKeeper, KeptCommunicator, KeptInfo, excluded_ranks
from hvdlite.planes.nccl.watcher import ABORT_SECONDS, CommunicatorRef, abort

_log = logging.getLogger("hvdlite")

_PEER_INFO: Final = msgspec.msgpack.Decoder(PeerInfo)


class _Answer(msgspec.Struct, frozen=True):
    """What the first rank of a communicator tells all of them."""

    problem: str = ""  # why there can be none
    unique_id: bytes = b""
    has_kernels: bool = False  # whether all ranks have them
    excluded: tuple[int, ...] = ()  # ranks without which the last world's communicator may become this one


_ANSWER: Final = msgspec.msgpack.Decoder(_Answer)


class Communicators:
    """See above. The background thread calls it; what NCCL may block in runs on the launch thread.

    Attributes:
        refs: by process set.

    Args:
        host: an identifier of this rank's host.
        oob: carries the ranks' `PeerInfo`.
        staging: for the first collective of a communicator.
        keeper: keeps a communicator for the next world; None if none is kept.
        shared_gpu: whether several ranks may share a GPU.
    """

    def __init__(self, rank: int, host: str, oob: OobChannel, thread: LaunchThread, device: Device, staging: StagingBuffer,
                 keeper: CommunicatorKeeper | None, *, shared_gpu: bool) -> None:
        self.refs: dict[int, CommunicatorRef] = {}
        self._rank, self._host, self._oob, self._thread = rank, host, oob, thread
        self._device, self._staging, self._keeper, self._shared_gpu = device, staging, keeper, shared_gpu
        self._tokens: dict[int, bytes] = {}  # by process set: see `KeptInfo`
        self._to_abort: list[CommunicatorRef] = []  # by `close`, also if no process set has them yet
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
        kept = self._keeper.take() if self._keeper is not None and process_set_id == GLOBAL_PROCESS_SET_ID else None
        if kept is not None:
            self._to_abort.append(kept.ref)
        info = PeerInfo(self._host, device.bus_id(), device.version, has_kernels, unique_id,
                        kept.info if kept is not None and kept.device.index == device.index else None)
        text = msgspec.msgpack.encode(info)
        answer = _ANSWER.decode(self._oob.gather_and_broadcast(f"nccl.{process_set_id}", ranks, text,
                                                               functools.partial(self._check_peers, ranks), wait_until))
        if answer.problem:
            raise HorovodInternalError(answer.problem)
        ref = None
        if kept is not None:
            ref = self._shrunk(kept, ranks, answer, wait_until)
            self._thread.run(lambda: abort([kept.ref], device, ABORT_SECONDS), wait_until)
        self._tokens[process_set_id] = hashlib.sha256(answer.unique_id).digest()
        self.refs[process_set_id] = ref or self._thread.run(lambda: self._make(process_set_id, ranks, answer), wait_until)

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
        return list({*refs, *self._to_abort})

    def keep(self, ref: CommunicatorRef) -> bool:
        """Stop the communicator of all ranks, and keep it for the next world; return False if it has to be aborted."""
        device = self._device
        if self._keeper is None or ref.ended or len(ref.ranks) == 1 or device.shrink_missing():
            return False
        try:
            device.revoke(ref.communicator, ABORT_SECONDS)
        except device.failure as error:
            _log.info("rank %d: the communicator is not kept: %s", self._rank, device.explain(ref.communicator, error))
            return False
        info = KeptInfo(self._tokens[GLOBAL_PROCESS_SET_ID], ref.ranks.index(self._rank), len(ref.ranks))
        self._keeper.put(KeptCommunicator(ref, info, device))
        return True

    def _shrunk(self, kept: KeptCommunicator, ranks: tuple[int, ...], answer: _Answer,
                wait_until: WaitUntil) -> CommunicatorRef | None:
        """Return a communicator that was made from the last world's on all ranks, or None on all."""
        if not answer.excluded:
            return None
        device, ref, problem = self._device, None, ""
        try:
            ref = self._thread.run(lambda: self._known(device.shrink(
                kept.ref.communicator, answer.excluded, SHRINK_SECONDS), ranks, answer), wait_until)
        except device.failure as error:
            problem = f"rank {self._rank}: {device.explain(kept.ref.communicator, error)}. "
        problem = self._oob.gather_and_broadcast("nccl.shrunk", ranks, problem.encode(), b"".join, wait_until).decode()
        if ref is not None and not problem:
            made = ref
            self._thread.run(lambda: self._make_ready(made), wait_until)  # has no time limit: all ranks come
            _log.info("rank %d: made the communicator of ranks %s from the last world's", self._rank, list(ranks))
            return made
        _log.info("rank %d: ranks %s make a new communicator: %s", self._rank, list(ranks), problem)
        if ref is not None:
            self._thread.run(lambda: abort([ref], device, ABORT_SECONDS), wait_until)
        return None

    def _check_peers(self, ranks: tuple[int, ...], texts: Sequence[bytes]) -> bytes:
        """Return the answer to the ranks of a communicator; called on its first rank."""
        peers = {rank: _PEER_INFO.decode(text) for rank, text in zip(ranks, texts, strict=True)}
        try:
            check_peers(peers, shared=self._shared_gpu)
        except HorovodInternalError as error:
            return msgspec.msgpack.encode(_Answer(str(error)))
        have_kernels = all(each.has_kernels for each in peers.values())
        excluded = excluded_ranks([peers[rank].kept for rank in ranks])
        return msgspec.msgpack.encode(_Answer("", peers[ranks[0]].unique_id, have_kernels, excluded))

    def _make(self, process_set_id: int, ranks: tuple[int, ...], answer: _Answer) -> CommunicatorRef:
        device, what = self._device, f"making a communicator of ranks {list(ranks)}"
        try:
            made = device.communicator(len(ranks), answer.unique_id, ranks.index(self._rank), f"hvdlite.{process_set_id}")
        except device.failure as error:
            raise nccl_error(self._rank, device, None, what, error) from error
        ref = self._known(made, ranks, answer)
        self._make_ready(ref)
        _log.info("rank %d: %s on GPU %d", self._rank, what, device.index)
        return ref

    def _known(self, made: Communicator, ranks: tuple[int, ...], answer: _Answer) -> CommunicatorRef:
        """Let `close` know a new communicator as early as possible."""
        ref = CommunicatorRef(made, ranks, has_kernels=answer.has_kernels)
        self._to_abort = [*(each for each in self._to_abort if not each.ended), ref]
        self._check_open(ref)
        return ref

    def _make_ready(self, ref: CommunicatorRef) -> None:
        """Make a communicator ready for collectives; waits for its ranks."""
        device = self._device
        try:
            device.complete(ref.communicator)
            self._check_open(ref)
            # The first call connects the ranks, which blocks; better here than in a training step.
            warm = self._staging.get(4096)
            ref.communicator.allReduce(warm, warm, 1024, DTYPES["float32"], collectives.SUM, device.stream)
        except device.failure as error:
            what = f"making a communicator of ranks {list(ref.ranks)}"
            raise nccl_error(self._rank, device, ref.communicator, what, error) from error

    def _check_open(self, ref: CommunicatorRef) -> None:
        """Abort a new communicator if the world was lost meanwhile: nobody else may know it."""
        if self._closing:
            ref.end()
            raise HorovodInternalError(f"making a communicator of ranks {list(ref.ranks)} was given up")


def nccl_error(rank: int, device: Device, communicator: Any, what: str, error: Exception) -> HorovodInternalError:
    """Return the error that a rank raises when NCCL or CUDA fails in `what`."""
    if isinstance(error, MemoryError):
        return HorovodInternalError(f"rank {rank}: out of memory in {what}: {error}")
    if not isinstance(error, (device.failure[0], KeyError, NcclError)):
        return HorovodInternalError(f"rank {rank}: CUDA failed in {what} on GPU {device.index}: {error}")
    return HorovodInternalError(f"rank {rank}: NCCL failed in {what} on GPU {device.index}: "
                                f"{device.explain(communicator, error)}; NCCL_DEBUG=INFO tells more")
