"""Calls of CUDA's driver API that CuPy does not have, or during which it keeps the GIL; and the bandwidth of copies between
GPUs, for `hvdrun --doctor`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
from typing import Any, Final

_log = logging.getLogger("hvdlite")

RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: this thread's calls do not invalidate a capture by another thread."""


class Driver:
    """CUDA's driver library, through ctypes, which releases the GIL; each call has an answer for when it is missing.

    Args:
        name: of the library.
    """

    def __init__(self, name: str = "libcuda.so.1") -> None:
        try:
            library: Any = ctypes.CDLL(name)
            self._exchange, self._query, self._state = (
                library.cuThreadExchangeStreamCaptureMode, library.cuEventQuery, library.cuDevicePrimaryCtxGetState)
            self._get, self._uuid = library.cuDeviceGet, library.cuDeviceGetUuid_v2  # v1 does not support slices
        except (OSError, AttributeError) as error:
            _log.warning("a CUDA graph that another thread captures may be spoilt by hvdlite's: %s", error)
            self._exchange = self._query = self._state = self._uuid = None
            return
        self._query.argtypes = [ctypes.c_void_p]

    def relax_captures(self, mode: int = RELAXED) -> int:
        """Let the calling thread do anything while a CUDA graph is captured; return its mode before.

        Args:
            mode: another mode.
        """
        before = ctypes.c_int(mode)
        if self._exchange is not None:
            self._exchange(ctypes.byref(before))
        return before.value

    def event_status(self, event: int) -> int | None:
        """Return the status of an event: 0 when it is done. None without a driver."""
        return None if self._query is None else int(self._query(event))

    def uuid(self, index: int) -> str:
        """Return what is unique to a GPU, or to the slice of it (MIG) that this process uses; "" without a driver."""
        number, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if self._uuid is None or self._get(ctypes.byref(number), index) or self._uuid(uuid, number):
            return ""
        return bytes(uuid).hex()

    def has_context(self, index: int) -> bool:
        """Return whether this process uses a GPU; True without a driver."""
        flags, active = ctypes.c_uint(), ctypes.c_int(1)
        if self._state is not None:
            self._state(index, ctypes.byref(flags), ctypes.byref(active))
        return bool(active.value)


_BYTES: Final = 64 << 20
_ROUNDS: Final = 5


def measure(runtime: Any) -> list[dict[str, Any]]:
    """Return {"gpus": two PCI addresses, "bytes_per_second": of copies from the first to the second} for each pair.

    Args:
        runtime: `cupy.cuda.runtime`.
    """
    found = []
    for first, second in itertools.combinations(range(runtime.getDeviceCount()), 2):
        for device, peer in ((second, first), (first, second)):
            runtime.setDevice(device)
            if runtime.deviceCanAccessPeer(device, peer):
                with contextlib.suppress(runtime.CUDARuntimeError):  # another pair may have done it
                    runtime.deviceEnablePeerAccess(peer)
        found.append({"gpus": [str(runtime.deviceGetPCIBusId(device)).lower() for device in (first, second)],
                      "bytes_per_second": _bandwidth(runtime, first, second)})
    return found


def _bandwidth(runtime: Any, first: int, second: int) -> float:
    """Copy once to warm up, and then a few times between two events on the current device, which is the first."""
    source, begin, end = runtime.malloc(_BYTES), runtime.eventCreate(), runtime.eventCreate()
    runtime.setDevice(second)
    target = runtime.malloc(_BYTES)
    runtime.setDevice(first)
    try:
        for rounds in (1, _ROUNDS):
            runtime.eventRecord(begin, 0)
            for _ in range(rounds):
                runtime.memcpyPeerAsync(target, second, source, first, _BYTES, 0)
            runtime.eventRecord(end, 0)
            runtime.eventSynchronize(end)
        return float(_ROUNDS * _BYTES / (runtime.eventElapsedTime(begin, end) / 1e3))
    finally:
        runtime.eventDestroy(begin)
        runtime.eventDestroy(end)
        runtime.free(source)
        runtime.setDevice(second)
        runtime.free(target)
