"""The bandwidth of copies between the GPUs of a host, for `hvdrun --doctor`."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Final

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
