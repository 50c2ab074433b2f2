"""Collectives on Python objects: pickled to bytes, and carried as arrays.

Only bytes that an authenticated rank of the job has sent are unpickled: their length and SHA-256 travel over the control
plane, which is authenticated, and are compared with the bytes that a data plane brings (docs/protocol.md#objects). Names
never derive from the object's type, which may differ between ranks; sizes are 64-bit. What a rank cannot pickle is an error
on all of them: it sends the reason instead, with a negative length.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Mapping
from typing import Any, Final

import cloudpickle
import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import ProtocolError, UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.runtime.runtime import Runtime

_SUMMARY: Final = struct.Struct("<q32s")
"""Of a payload: its length, negative for an error's text, and its SHA-256."""


def broadcast_object(runtime: Runtime, value: Any, root_rank: int, name: str,
                     process_set: int = GLOBAL_PROCESS_SET_ID) -> Any:
    """Return rank `root_rank`'s `value` on every rank; the others' `value` is ignored.

    Raises:
        HorovodInternalError: like every collective.
        ProtocolError: when the object's bytes are not those that its rank has sent.
        UnsupportedError: on all ranks, when the object cannot be pickled.
    """
    is_root = runtime.world.rank == root_rank
    sent = _Payload.of(value) if is_root else _Payload(np.empty(0, np.uint8))
    summary = sent.summary()
    runtime.broadcast(f"{name}.summary", summary, root_rank, process_set=process_set, over_control=True).wait()
    length, digest = _SUMMARY.unpack(summary.tobytes())
    payload = sent.payload if is_root else np.empty(abs(length), np.uint8)
    runtime.broadcast(f"{name}.bytes", payload, root_rank, process_set=process_set).wait()
    if not is_root:
        _verify(payload, digest, name, root_rank)
    if length < 0:
        raise _refusal({root_rank: payload}) from sent.error
    return value if is_root else loads(payload.tobytes())


def allgather_object(runtime: Runtime, value: Any, name: str, process_set: int = GLOBAL_PROCESS_SET_ID) -> list[Any]:
    """Return the `value` of every rank of a process set, in rank order.

    Raises:
        HorovodInternalError: like every collective.
        ProtocolError: when the object's bytes are not those that its rank has sent.
        UnsupportedError: on all ranks, when some object cannot be pickled.
    """
    sent = _Payload.of(value)
    handle = runtime.allgather(f"{name}.summaries", sent.summary()[None], process_set=process_set, over_control=True)
    everything = runtime.allgather(f"{name}.bytes", sent.payload, process_set=process_set).wait()
    summaries = handle.wait()
    assert everything is not None and summaries is not None
    lengths, digests = zip(*(_SUMMARY.unpack(each.tobytes()) for each in summaries), strict=True)
    parts = np.split(everything, np.cumsum(np.abs(lengths))[:-1])
    for rank, part, digest in zip(handle.contributors, parts, digests, strict=True):
        _verify(part, digest, name, rank)
    refused = {rank: part for rank, part, length in zip(handle.contributors, parts, lengths, strict=True) if length < 0}
    if refused:
        raise _refusal(refused) from sent.error
    return [loads(part.tobytes()) for part in parts]


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
            return cls(np.frombuffer(f"{type(error).__name__}: {error}".encode(errors="replace"), np.uint8).copy(), error)

    def summary(self) -> Array:
        """Return the length, negative for an error's text, and the digest of the payload."""
        length = self.payload.size if self.error is None else -self.payload.size
        return np.frombuffer(_SUMMARY.pack(length, hashlib.sha256(self.payload.data).digest()), np.uint8).copy()


def _verify(payload: Array, digest: bytes, name: str, rank: int) -> None:
    """Check that the bytes are those that a rank has sent.

    Raises:
        ProtocolError: when they are not.
    """
    if hashlib.sha256(payload.data).digest() != digest:
        raise ProtocolError(f"'{name}': the object of rank {rank} arrived with other bytes than rank {rank} has sent, and "
                            "is not unpickled: a process that is not of this job takes part in the connections between "
                            "ranks, or memory or network are faulty")


def _refusal(texts: Mapping[int, Array]) -> UnsupportedError:
    reasons = "; ".join(f"rank {rank}'s object cannot be pickled: {text.tobytes().decode(errors='replace')}"
                     for rank, text in texts.items())
    return UnsupportedError(f"{reasons}; send what can be, such as a state_dict")
