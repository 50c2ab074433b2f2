"""Python objects between ranks: pickled to bytes, carried as arrays.

Only bytes that came from an authenticated rank of the job are unpickled. Names never derive from the object's type, which
may differ between ranks; sizes are 64-bit.
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.runtime.runtime import Runtime


def broadcast_object(runtime: Runtime, value: Any, root_rank: int, name: str,
                     process_set: int = GLOBAL_PROCESS_SET_ID) -> Any:
    """Return rank `root_rank`'s `value` on every rank; the others' `value` is ignored.

    Raises:
        HorovodInternalError: like every collective.
    """
    is_root = runtime.world.rank == root_rank
    payload = np.frombuffer(cloudpickle.dumps(value), np.uint8).copy() if is_root else np.empty(0, np.uint8)
    length = np.array(payload.size, np.int64)
    runtime.broadcast(f"{name}.length", length, root_rank, process_set=process_set).wait()
    if not is_root:
        payload = np.empty(int(length), np.uint8)
    runtime.broadcast(f"{name}.bytes", payload, root_rank, process_set=process_set).wait()
    return value if is_root else _loaded(payload)


def allgather_object(runtime: Runtime, value: Any, name: str, process_set: int = GLOBAL_PROCESS_SET_ID) -> list[Any]:
    """Return the `value` of every rank of a process set, in rank order."""
    payload = np.frombuffer(cloudpickle.dumps(value), np.uint8)
    lengths = runtime.allgather(f"{name}.lengths", np.array([payload.size], np.int64), process_set=process_set)
    everything = runtime.allgather(f"{name}.bytes", payload, process_set=process_set).wait()
    counts = lengths.wait()
    assert everything is not None and counts is not None
    ends = np.cumsum(counts)
    return [_loaded(part) for part in np.split(everything, ends[:-1])]


def _loaded(payload: Array) -> Any:
    return cloudpickle.loads(payload.tobytes())
