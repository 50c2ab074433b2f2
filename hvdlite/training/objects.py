"""Collectives on Python objects: pickled to bytes, and carried as arrays.

Only bytes that came from an authenticated rank of the job are unpickled. Names never derive from the object's type, which
may differ between ranks; sizes are 64-bit. What a rank cannot pickle is an error on all of them: it sends the reason
instead, with a negative length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.runtime.runtime import Runtime


def broadcast_object(runtime: Runtime, value: Any, root_rank: int, name: str,
                     process_set: int = GLOBAL_PROCESS_SET_ID) -> Any:
    """Return rank `root_rank`'s `value` on every rank; the others' `value` is ignored.

    Raises:
        HorovodInternalError: like every collective.
        UnsupportedError: on all ranks, when the object cannot be pickled.
    """
    is_root = runtime.world.rank == root_rank
    sent = _Payload.of(value) if is_root else _Payload(np.empty(0, np.uint8))
    length = np.array(sent.length, np.int64)
    runtime.broadcast(f"{name}.length", length, root_rank, process_set=process_set).wait()
    payload = sent.payload if is_root else np.empty(abs(int(length)), np.uint8)
    runtime.broadcast(f"{name}.bytes", payload, root_rank, process_set=process_set).wait()
    if length < 0:
        raise _refusal({root_rank: payload}) from sent.error
    return value if is_root else _loaded(payload)


def allgather_object(runtime: Runtime, value: Any, name: str, process_set: int = GLOBAL_PROCESS_SET_ID) -> list[Any]:
    """Return the `value` of every rank of a process set, in rank order.

    Raises:
        HorovodInternalError: like every collective.
        UnsupportedError: on all ranks, when some object cannot be pickled.
    """
    sent = _Payload.of(value)
    lengths = runtime.allgather(f"{name}.lengths", np.array([sent.length], np.int64), process_set=process_set)
    everything = runtime.allgather(f"{name}.bytes", sent.payload, process_set=process_set).wait()
    counts = lengths.wait()
    assert everything is not None and counts is not None
    parts = np.split(everything, np.cumsum(np.abs(counts))[:-1])
    refused = {rank: part for rank, part, count in zip(lengths.contributors, parts, counts, strict=True) if count < 0}
    if refused:
        raise _refusal(refused) from sent.error
    return [_loaded(part) for part in parts]


def dumps(value: Any) -> bytes:
    """Return an object as bytes; functions and classes of the script are pickled by value."""
    return bytes(cloudpickle.dumps(value))


def loads(content: bytes) -> Any:
    """Return the object whose bytes a collective of this module has brought."""
    return cloudpickle.loads(content)


@dataclasses.dataclass
class _Payload:
    """An object as bytes; or why it has none, as text."""

    payload: Array
    error: Exception | None = None

    @classmethod
    def of(cls, value: Any) -> _Payload:
        try:
            return cls(np.frombuffer(dumps(value), np.uint8).copy())
        except Exception as error:  # of any kind: the object's own methods are called
            return cls(np.frombuffer(f"{type(error).__name__}: {error}".encode(), np.uint8).copy(), error)

    @property
    def length(self) -> int:
        """Of the payload; negative when it is an error's text."""
        return self.payload.size if self.error is None else -self.payload.size


def _refusal(texts: Mapping[int, Array]) -> UnsupportedError:
    told = "; ".join(f"rank {rank}'s object cannot be pickled: {text.tobytes().decode()}" for rank, text in texts.items())
    return UnsupportedError(f"{told}; send what can be, such as a state_dict")


def _loaded(payload: Array) -> Any:
    return loads(payload.tobytes())
