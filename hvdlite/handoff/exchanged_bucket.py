"""Learned buckets in mailboxes: the threads that wait for a bucket reduce it, each rank a slice, in the memory of all."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.handoff.buckets import BucketEntry, BucketHandle, LearnedBucket
from hvdlite.handoff.exchange import CHUNK, BucketSignature, MailboxCall, MailboxExchange
from hvdlite.handoff.handle import BlockedWaiters
from hvdlite.handoff.mailbox import MailboxEnd
from hvdlite.memory.area import Area
from hvdlite.negotiation.messages import BucketReady, Wait
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.exchange import ReduceInPlace

MOST_UNUSED: Final = 64
"""Unused members of which a text lists the indices; of more it has a digest, because it is short."""
_NOTHING = np.empty(0, np.uint8)


class BucketCall(MailboxCall):
    """A bucket that is filled on this rank."""

    __slots__ = ("bucket", "ready")
    patience_seconds = 2.0  # ranks take different times for a step
    is_in_place = True

    def __init__(self, bucket: LearnedBucket, ready: BucketReady, waiters: BlockedWaiters) -> None:
        response = bucket.definition.response
        digest = hashlib.sha256(repr(ready.unused).encode()).hexdigest() if len(ready.unused) > MOST_UNUSED else ""
        signature = BucketSignature(ready.bucket_id, digest or ready.unused, ready.in_step, ready.round_id - ready.step)
        super().__init__((response.process_set_id, response.names[0]), signature, ready.round_id, _NOTHING, None,
                         lambda: BucketEntry(bucket, ready, waiters))
        self.bucket, self.ready = bucket, ready

    def exchange(self, members: tuple[int, ...], area: Area, casts: Casts) -> MailboxExchange:
        return BucketExchange(self.bucket, area, casts)


class BucketExchange(MailboxExchange):
    """The values are where the ranks reduce them."""

    def __init__(self, bucket: LearnedBucket, area: Area, casts: Casts) -> None:
        response = bucket.definition.response
        dtype = SUPPORTED_DTYPES[response.dtype]
        reduction = Reduction(response, dtype, area.size, CHUNK // dtype.itemsize, casts)
        self._reduce = ReduceInPlace(reduction, bucket.buffer_slice.slots(dtype), area.index)

    def write(self, call: MailboxCall, parity: int) -> None:
        self._reduce.begin()

    def collect(self, call: MailboxCall, parity: int) -> None:
        self._reduce.run()


class ExchangedBucket(BucketHandle):
    """A bucket in a mailbox: who waits for it takes part in its reduction.

    Args:
        call: what is written to the mailbox.
        end: this rank's end of it.
    """

    __slots__ = ("_call", "_end")

    def __init__(self, call: BucketCall, end: MailboxEnd, waiters: BlockedWaiters) -> None:
        response = call.bucket.definition.response
        waits_for = Wait(response.process_set_id, call.bucket.definition.members[0].label, call.ready.round_id)
        super().__init__(response.names[0], waiters, waits_for)
        self._call, self._end = call, end

    def wait(self, timeout: float | None = None, *, deferrable: bool = False) -> None:
        call, progress = self._call, self._waiters.progress
        if self._done:
            return
        self._end.take_part(call, progress.block, progress.unblock)
        if call.entry is None:
            self.contributors, self.globally_unused = self._end.members, frozenset(call.ready.unused)
        else:
            assert isinstance(call.entry, BucketEntry)
            handle = call.entry.handle
            handle.wait(timeout, deferrable=deferrable)
            self.contributors, self.ranks_in_step, self.parts = handle.contributors, handle.ranks_in_step, handle.parts
            self.globally_unused, self.partly_unused = handle.globally_unused, handle.partly_unused
        self._done = True
