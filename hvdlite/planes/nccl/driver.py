"""Calls of CUDA's driver API that CuPy does not have, or during which it keeps the GIL."""

from __future__ import annotations

import ctypes
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
