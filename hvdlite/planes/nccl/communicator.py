"""NCCL's communicators through ctypes: with a configuration, nonblocking ones, and those made from others.

CuPy makes communicators without a configuration, and does not know a call that goes on in the background.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from hvdlite.planes.nccl.api import CTA_POLICIES, IN_PROGRESS, Config, NcclApi, NcclError

_POLL_SECONDS: Final = 5e-5


@dataclasses.dataclass(frozen=True)
class NcclOptions:
    """What knobs say about NCCL; equal on all ranks.

    Attributes:
        windows: whether memory of buckets becomes symmetric windows, where that works.
        blocking: whether calls block until NCCL has done its part on the host.
        max_ctas: the most thread blocks per collective; 0 leaves it to NCCL.
        cta_policy: how NCCL chooses their number.
        shrink: whether the communicator of a lost world may become that of the next one; not for blocking ones.
    """

    windows: bool = False
    blocking: bool = True
    max_ctas: int = 0
    cta_policy: str = "default"
    shrink: bool = False

    @property
    def needs_config(self) -> bool:
        """Whether communicators cannot be CuPy's."""
        return not self.blocking or self.max_ctas > 0 or self.cta_policy != "default"

    def config(self, name: str) -> Config:
        """Return the configuration of a communicator.

        Args:
            name: in NCCL's messages and profiles.
        """
        made = Config()
        made.blocking, made.commName = int(self.blocking), name.encode()
        if self.max_ctas:
            made.maxCTAs = self.max_ctas
        if self.cta_policy != "default":
            made.CTAPolicy = CTA_POLICIES[self.cta_policy]
        return made


DEFAULT_OPTIONS: Final = NcclOptions()


class Groups:
    """Groups of calls of these communicators. NCCL keeps a group for each thread; one thread makes them here."""

    def __init__(self, api: NcclApi) -> None:
        self._api = api
        self._used: list[ConfiguredCommunicator] | None = None  # in the group that has begun

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Return a context whose calls form one group."""
        self._api.call("ncclGroupStart")
        used: list[ConfiguredCommunicator] = []
        self._used = used
        try:
            yield
        finally:
            self._used = None
            self._api.call("ncclGroupEnd")
        for communicator in used:
            communicator.complete()

    def defer(self, communicator: ConfiguredCommunicator) -> bool:
        """Note a call; return whether it takes place at the end of a group."""
        if self._used is None:
            return False
        if communicator not in self._used:
            self._used.append(communicator)
        return True


class ConfiguredCommunicator:
    """Has the methods of CuPy's communicator that a plane uses.

    A nonblocking one is used by one thread and aborted by another: `abort` ends a wait of the first at once.

    Attributes:
        comm: the `ncclComm_t`; 0 when it has been aborted.

    Args:
        config: lasts as long as the communicator, and those that are made from it.
    """

    def __init__(self, api: NcclApi, comm: int, groups: Groups, config: Config, *, blocking: bool) -> None:
        self.comm = comm
        self._api, self._groups, self._config, self.blocking = api, groups, config, blocking
        self._lock = threading.Lock()
        self._child: ctypes.c_void_p | None = None  # of a `shrink` that has not succeeded: NCCL may still store into it

    def _alone(self) -> AbstractContextManager[Any]:
        """Keep an abort out of a call that does not block; one that blocks is what an abort ends."""
        return contextlib.nullcontext() if self.blocking else self._lock

    def _call(self, function: str, *arguments: int) -> None:
        """Call a collective; its last argument is the stream, and that before it the communicator."""
        with self._alone():
            self._check_alive(function)
            status = self._api.call(function, *arguments[:-1], self.comm, arguments[-1])
        if not self.blocking and not self._groups.defer(self) and status == IN_PROGRESS:
            self.complete()

    def _check_alive(self, what: str) -> None:
        if not self.comm:
            raise NcclError(what, -1, "the communicator has been aborted")

    def complete(self, seconds: float = math.inf) -> None:
        """Wait until NCCL has done its part of a call on the host.

        Raises:
            NcclError: when it has failed, was aborted, or takes longer than this.
        """
        deadline = time.monotonic() + seconds
        while not self.blocking:
            with self._lock:
                self._check_alive("waiting for a call")
                if self._api.state(self.comm) != IN_PROGRESS:
                    return
            if time.monotonic() > deadline:
                raise NcclError("waiting for a call", IN_PROGRESS, f"it takes longer than {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)

    def register_window(self, pointer: int, nbytes: int) -> int:
        """Return the handle of a window; 0 if NCCL has no use for it."""
        with self._alone():
            self._check_alive("ncclCommWindowRegister")
            window = self._api.register_window(self.comm, pointer, nbytes)
        self.complete()
        return window.value or 0

    def revoke(self, seconds: float) -> None:
        """Stop what is under way; afterwards only `shrink` and `abort` are permitted."""
        with self._alone():
            self._check_alive("ncclCommRevoke")
            self._api.revoke(self.comm)
        self.complete(seconds)

    def shrink(self, excluded: Sequence[int], groups: Groups, seconds: float) -> ConfiguredCommunicator:
        """Return a communicator of the other ranks, in their order; all of them call this."""
        with self._alone():
            self._check_alive("ncclCommShrink")
            made = self._child = ctypes.c_void_p()
            self._api.shrink(self.comm, excluded, made)
        self.complete(seconds)
        with self._alone():
            self._check_alive("ncclCommShrink")
            if not made.value:
                raise NcclError("ncclCommShrink", -1, "it made no communicator")
            self._child = None
        return ConfiguredCommunicator(self._api, made.value, groups, self._config, blocking=self.blocking)

    def check_async_error(self) -> None:
        with self._alone():
            if self.comm:
                self._api.state(self.comm)

    def abort(self) -> None:
        with self._alone():
            comm, self.comm = self.comm, 0
            if comm:
                self._api.call("ncclCommAbort", comm)
            child, self._child = self._child, None
            if child is not None and child.value:
                self._api.call("ncclCommAbort", child)

    # --- like CuPy's ---------------------------------------------------------------------------------------------------

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._call("ncclAllReduce", source, target, count, dtype, op, stream)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        self._call("ncclReduce", source, target, count, dtype, op, root, stream)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._call("ncclBroadcast", source, target, count, dtype, root, stream)

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._call("ncclReduceScatter", source, target, count, dtype, op, stream)

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        self._call("ncclAllGather", source, target, count, dtype, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._call("ncclSend", source, count, dtype, peer, stream)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._call("ncclRecv", target, count, dtype, peer, stream)
