"""The calls of gradient reducers: rounds of gradient sets, member by member or in learned buckets."""

from __future__ import annotations

import dataclasses

from hvdlite.core.array import Array, dtype_name
from hvdlite.core.device import AnyArray, device_of
from hvdlite.core.device import Event as DeviceEvent
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.buckets import BucketEntry, BucketHandle, LearnedBucket, LearnedLayout
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.exchanged_bucket import BucketCall, ExchangedBucket
from hvdlite.handoff.handle import Handle
from hvdlite.handoff.handoff import Handoff
from hvdlite.negotiation.mailboxes import bucket_stem
from hvdlite.negotiation.messages import BucketReady, Layout, LayoutStale, Retired, RoundDone
from hvdlite.runtime.arguments import reducible
from hvdlite.runtime.collectives import Collectives


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """Where a rank is in the rounds of a gradient set."""

    label: str
    round: int  # from 1
    step: int = 0  # how many steps the optimizer has made
    in_step: bool = False  # it is in one
    sharded: bool = False  # its state is divided among the ranks


class GradientSets:
    """The calls that reduce gradient sets (docs/protocol.md#learning, #rounds, #layouts). Callable from any thread.

    A gradient set is the gradients of one optimizer. Every rank enqueues each member of a set once a round, with or without
    a gradient. When a layout has been learned, the members lie in its buckets, and full buckets are enqueued instead.
    """

    def __init__(self, collectives: Collectives, handoff: Handoff) -> None:
        self._collectives = collectives
        self._inbox, self._waiters, self._state = handoff.inbox, handoff.waiters, handoff.state
        self._mailboxes = handoff.mailboxes

    def enqueue_gradient(self, name: str, source: AnyArray | None, output: AnyArray, op: ReduceOp, moment: Moment, *,
                prescale: float = 1.0, postscale: float = 1.0, strides: tuple[int, ...] = (), group_id: int = 0,
                process_set: int = GLOBAL_PROCESS_SET_ID) -> Handle:
        """Like `allreduce`, of a member of a gradient set in a round; never travels eagerly.

        Args:
            strides: in elements; how `output` lies in the framework's memory. () is row-major.
            group_id: members with the same one, from 1, are learned as one bucket; 0 leaves that to the coordinator.
        """
        if source is None:
            self._waiters.progress.absent(1)
        request = self._collectives.request(
            name, Collective.ALLREDUCE, reducible(name, source, output, op), output.shape, op=op, prescale=float(prescale),
            postscale=float(postscale), absent=source is None, label=moment.label, round_id=moment.round, step=moment.step,
            in_step=moment.in_step, sharded=moment.sharded, strides=strides, group_id=group_id, process_set=process_set,
            device=device_of(output))
        return self._inbox.enqueue(Entry(request, [source], [output], output, self._waiters))

    def enqueue_rows(self, name: str, rows: Array, moment: Moment, *,
                     process_set: int = GLOBAL_PROCESS_SET_ID) -> Handle:
        """Like `enqueue_gradient`, of a member with a sparse gradient: the result is all ranks' rows, one after the other.

        Ranks that call `enqueue_gradient` without a source contribute none, and get the same result instead of their output.

        Args:
            rows: 2-D; what a row holds is the caller's business.
        """
        request = self._collectives.request(name, Collective.ALLGATHER, dtype_name(rows.dtype), rows.shape,
                                            label=moment.label, round_id=moment.round, step=moment.step,
                                            in_step=moment.in_step, sharded=moment.sharded, process_set=process_set)
        return self._inbox.enqueue(Entry(request, [rows], [], None, self._waiters))

    def layout(self, label: str, number: int) -> LearnedLayout | None:
        """Return the layout by which round `number` of a set is to be reported; None: member by member."""
        learned = self._state.layouts.get(label)
        return None if learned is None or learned.is_suspended or number < learned.layout.first_round else learned

    def is_suspended(self, label: str) -> bool:
        """Return whether a set has a layout that is not used until all ranks have joined."""
        learned = self._state.layouts.get(label)
        return learned is not None and learned.is_suspended

    def enqueue_bucket(self, bucket: LearnedBucket, ready: BucketReady, event: DeviceEvent | None = None) -> BucketHandle:
        """Every place of a learned bucket is filled. Its memory must not be touched until the handle is done.

        Args:
            event: on a GPU: after which it is filled.
        """
        self._inbox.check_usable(bucket.definition.members[0].name)
        if ready.unused:
            self._waiters.progress.absent(len(ready.unused))
        if ready.blocking:
            end = self._mailboxes.get((bucket.definition.response.process_set_id, bucket_stem(ready.bucket_id)))
            call = None if end is None else BucketCall(bucket, ready, self._waiters)
            if end is not None and call is not None and end.begin(call):
                return ExchangedBucket(call, end, self._waiters)
        entry = BucketEntry(bucket, ready, self._waiters, event)
        self._inbox.put(entry)
        return entry.handle

    def close_round(self, label: str, number: int, process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
        """All members of a set's round are enqueued by this rank; not needed when a bucket has reported it."""
        self._inbox.put(RoundDone(label, number, process_set))

    def mark_stale(self, layout: Layout) -> None:
        """A layout does not describe this rank's set any more: end it on all ranks."""
        self._inbox.put(LayoutStale(layout.layout_id))

    def retire(self, label: str, process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
        """This rank takes part in no further round of a set: the memory of its buckets goes back, on all ranks.

        Callable from finalizers: in any thread, in the middle of anything, in a forked child and after the end.
        """
        if not self._inbox.closed:
            self._inbox.post(Retired(label, process_set))
