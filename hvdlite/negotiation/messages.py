"""The messages between ranks. These structures *are* the protocol; the control plane only carries them.

A rank sends a `Report`; the coordinator answers with `Decision`s, which every rank applies in the same order. Everything
that changes shared state travels in a decision.

A *gradient set* is the gradients of one wrapped optimizer (or tape). Every rank reports each member exactly once a *round*.
From a round whose members were reported one by one the coordinator learns a *layout*, which cuts the set into *buckets*.
Then a rank reports one id when all members of a bucket are ready; see `negotiation/gradient_sets.py`.
"""

from __future__ import annotations

import enum

import msgspec

from hvdlite.core.ledger import Ledger
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp

Key = tuple[int, str, int]
"""A tensor's process set, its name, and the round of its gradient set (0 when it belongs to none)."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, compact on the wire, validated when decoded."""


class Request(Message, frozen=True, tag=1):
    """One tensor, or one group of tensors, that is ready on one rank.

    Every field must agree between the ranks of the process set but `absent`, `strides`, `splits`, `payload`, `blocking` and,
    for gathers and alltoall, `shape[0]`.
    """

    name: str
    collective: Collective
    dtype: str
    shape: tuple[int, ...]  # of a group: the number of elements of all members
    op: ReduceOp = ReduceOp.SUM
    root_rank: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    process_set_id: int = GLOBAL_PROCESS_SET_ID
    device: str = "cpu"
    splits: tuple[int, ...] = ()  # alltoall: rows for each rank of the set, which may differ between ranks
    members: tuple[int, ...] = ()  # ADD_PROCESS_SET: the ranks of the new set
    absent: bool = False  # this rank participates without contributing data (a parameter without a gradient)
    group: tuple[tuple[int, ...], ...] = ()  # shapes of the tensors of a group, which is answered as one
    payload: bytes | None = None  # eager lane: the tensor itself; the coordinator may ignore it
    label: str = ""  # the gradient set it belongs to, or ""
    round_id: int = 0  # of that set, counted from 1
    strides: tuple[int, ...] = ()  # how this rank lays out a member of a gradient set, in elements; () is row-major
    group_id: int = 0  # members of a gradient set with the same one, from 1, share a bucket
    step: int = 0  # of a gradient set: steps of its optimizer since all ranks have last joined
    in_step: bool = False  # of a gradient set: this rank reports it from within its optimizer's step
    sharded: bool = False  # of a gradient set: its optimizer's state is divided among the ranks
    blocking: bool = False  # a thread of this rank is blocked until it is done, so a mailbox may replace such requests

    @property
    def key(self) -> Key:
        """The key by which requests of different ranks meet: a rank that lacks a member may be a round ahead with it."""
        return self.process_set_id, self.name, self.round_id


class RoundDone(Message, frozen=True, tag=3):
    """This rank has reported every member that it has of a gradient set in a round. Reporting it again changes nothing."""

    label: str
    round_id: int
    process_set_id: int = GLOBAL_PROCESS_SET_ID


class BucketReady(Message, frozen=True, kw_only=True, tag=2):
    """All slices of a learned bucket are filled on this rank."""

    bucket_id: int
    round_id: int  # of the gradient set, as in `Request`
    unused: tuple[int, ...] = ()  # indices of members without a gradient here; their slices hold the op's identity element
    unused_somewhere: tuple[int, ...] = ()  # from a leader: indices that are unused on some of its ranks, not all
    ends_round: bool = False  # it was the set's last bucket of the round on this rank
    step: int = 0  # as in `Request`
    in_step: bool = False  # as in `Request`
    blocking: bool = False  # likewise; it is all that this rank brings to the round


class Wait(Message, frozen=True):
    """The tensor, or the round of a gradient set, on which a thread has been blocked for long."""

    process_set_id: int
    name: str  # the tensor's, or the set's label
    round_id: int = 0  # 0 for a tensor
    deferrable: bool = False  # the coordinator may end this wait (`Decision.deferred`)


class LayoutStale(Message, frozen=True, tag=4):
    """A layout does not describe this rank's gradient set any more."""

    layout_id: int


class Retired(Message, frozen=True, tag=6):
    """This rank takes part in no further round of a gradient set: its optimizer is gone."""

    label: str
    process_set_id: int = GLOBAL_PROCESS_SET_ID


class MailboxStale(Message, frozen=True, tag=8):
    """A thread of this rank has waited long in a mailbox, or what it found there does not fit, or the rank cannot use it."""

    mailbox_id: int
    name: str  # the tensor


class MailboxFrozen(Message, frozen=True, tag=9):
    """This rank does not write to a mailbox any more."""

    mailbox_id: int
    round_id: int  # the last round that it has written


ReportItem = Request | BucketReady | RoundDone | LayoutStale | Retired | MailboxStale | MailboxFrozen
"""An item of a report, about tensors. Tags (positive integers) distinguish the types on the wire."""


class FailureNotice(Message, frozen=True):
    """Why the job ends: the rank where the failure began, and the error there."""

    origin: int  # the rank where the failure began, never one that passed it on; -1: none, the world is stopped
    kind: str  # "lost", "stopped", or the type of the exception that rank raised
    message: str
    traceback: str = ""
    blamed: tuple[int, ...] = ()  # the ranks that hold up the others though their processes live, as far as is known


class GpuProgress(Message, frozen=True):
    """How far the GPU of a rank is in the plans of a process set: their sequence numbers, which are equal on all ranks."""

    process_set_id: int
    launched: int  # the last one launched
    reached: int  # the last one before which the GPU has nothing else to do any more
    done: int  # the last one that is over


class OverdueWork(Message, frozen=True):
    """A plan that a GPU was given long ago, and has not done."""

    process_set_id: int
    sequence: int
    ranks: tuple[int, ...]  # of the process set
    name: str  # of the tensor; of several, the first and the last
    seconds: float  # since the launch


class RankStatus(Message, frozen=True, kw_only=True):
    """The state of a rank, for a stall report."""

    location: str  # where its script is: function, file and line
    stack: str
    recent: tuple[str, ...]  # names of its last collectives, oldest first
    first_number: int  # the number of the first of them, counted from 1
    waiting: tuple[str, ...]  # names of its pending collectives
    gpu: tuple[GpuProgress, ...] = ()  # by process set
    ledger: Ledger = Ledger()  # of the last half minute


class TraceEvent(Message, frozen=True):
    """One event of the timeline, as in Chrome's trace format."""

    phase: str  # B: a span begins, E: the innermost span ends, i: an instant; "end": the rank's last event
    when: float  # microseconds on the clock that all ranks of the job share
    lane: str  # the tensor
    name: str
    detail: str = ""


class OobMessage(Message, frozen=True):
    """A few bytes by which planes of different ranks connect, out of band; see `engine.oob`."""

    label: str  # what it is for; never used again
    sender: int
    payload: bytes
    receivers: tuple[int, ...] = ()  # empty: the coordinator keeps it until a rank fetches it


class OobKey(Message, frozen=True):
    """Names an out-of-band message that another rank publishes at the coordinator."""

    label: str
    sender: int


class SideMessage(Message, frozen=True, kw_only=True):
    """The part of a report that is not about tensors. It passes by the coordinator: other parts of rank 0 handle it."""

    status: RankStatus | None = None  # the answer to a status request
    ping: bool = False  # rank 0 is to answer with a decision
    slow_peers: tuple[int, ...] = ()  # the other ranks of a collective that has been under way for long
    requests_report: bool = False  # its user requests a stall report
    overdue: OverdueWork | None = None  # its GPU has been at it for long
    trace: tuple[TraceEvent, ...] = ()  # while there is a timeline
    oob_messages: tuple[OobMessage, ...] = ()
    oob_requests: tuple[OobKey, ...] = ()  # messages of other ranks that it fetches
    oob_withdrawn: tuple[str, ...] = ()  # labels of its own messages that no rank will fetch any more


class CallWait(Message, frozen=True):
    """A call of a group in which a rank has waited for long. Ranks are those of the job."""

    name: str  # for reports: the group, the number of the call, and what it is
    sequence: int  # the number of the call in the group; 0 for a send or receive
    ranks: tuple[int, ...]  # that take part
    missing: tuple[int, ...]  # those for which it waits, as seen by this rank
    seconds: float  # since it has begun


class GroupCalls(Message, frozen=True):
    """How far a rank is in a group."""

    group: str  # an id, the same on all its ranks and never used again
    begun: int  # the number of the call that it has begun last
    waits: tuple[CallWait, ...] = ()


class Blocked(Message, frozen=True):
    """The waits in which a rank's threads have been blocked for long.

    It is void once one of `waits` is over; the rank reports when one of its `groups` is.
    """

    waits: tuple[Wait, ...]  # one for each thread that is blocked in a negotiated collective
    all_threads: bool = True  # no other Python thread of the rank could still call a collective
    groups: tuple[GroupCalls, ...] = ()  # those of which the rank is a member


class Report(Message, frozen=True, kw_only=True):
    """One rank's report to rank 0."""

    epoch: int  # membership epoch; a report of another epoch is dropped
    applied: int  # the last decision this rank has applied
    items: tuple[ReportItem, ...] = ()  # in the order in which they happened on this rank
    side_message: SideMessage | None = None
    leaving: bool = False  # this rank enqueues nothing after these items
    failure: FailureNotice | None = None
    blocked: Blocked | None = None  # replaces the one reported before; takes effect after the items


class RankReport(Message, frozen=True, tag=5):
    """A report of one rank. A leader passes it on so where it differs from those of its host's other ranks."""

    rank: int
    report: Report


class MergedRequests(Message, frozen=True, tag=7):
    """Some ranks of a host made the same requests."""

    ranks: tuple[int, ...]
    requests: tuple[Request, ...]


class HostReport(Message, frozen=True, kw_only=True):
    """The reports of a host's ranks, merged by their leader."""

    epoch: int  # as in `Report`
    applied: int  # the lowest of its ranks
    # In the order of the ranks' reports; a merged item stands where the last rank reported it. A bucket or a finished round
    # is of all ranks of the host in the process set; a bucket's `unused` lists the members that are unused on all of them.
    items: tuple[RankReport | MergedRequests | BucketReady | RoundDone, ...] = ()
    lost: tuple[tuple[int, str], ...] = ()  # ranks whose end the leader has seen, and how


class ErrorKind(enum.IntEnum):
    """The error that a refused tensor raises."""

    NONE = 0
    MISMATCH = 1
    LEFT = 2


class Response(Message, frozen=True, kw_only=True):
    """What every rank does with some tensors, in the order of `names`."""

    names: tuple[str, ...]
    collective: Collective
    dtype: str
    op: ReduceOp = ReduceOp.SUM
    root_rank: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    process_set_id: int = GLOBAL_PROCESS_SET_ID
    round_id: int = 0  # as in the requests; equal for all tensors of one response
    elements: int = 0  # of all tensors together, where it is the same on all ranks; for ranks without data
    divisor: int = 0  # what Average divides by; 0 is the number of ranks in the process set
    contributors: tuple[int, ...] = ()  # ranks of the job, ascending; one not listed is skipped by the reduction
    # Gathers: the rows of each rank; scatters: the rows that each rank gets; alltoall: the most that a rank sends, and
    # receives. Adasum: the elements of each tensor. ADD_PROCESS_SET: the set's id. JOIN: the last rank.
    rows: tuple[int, ...] = ()
    row_elements: int = 0  # of those rows
    members: tuple[int, ...] = ()  # ADD_PROCESS_SET: as in the requests
    error: ErrorKind = ErrorKind.NONE
    error_text: str = ""
    result: bytes | None = None  # eager lane: the result itself
    device: str = "cpu"  # where the tensors are, as in the requests
    ranks_in_step: tuple[int, ...] = ()  # of a gradient set: ranks that reported it from within their step; () when all did

    def prescale_over(self, ranks: int) -> float:
        """Return by what each of so many ranks multiplies its contribution before a sum; for an average, also 1 / ranks."""
        return self.prescale / ((self.divisor or ranks) if self.op is ReduceOp.AVERAGE else 1)


class Bucket(Message, frozen=True, kw_only=True):
    """Members of a gradient set that are reduced together, and their slices of the bucket."""

    bucket_id: int  # never used again, even after eviction
    members: tuple[Request, ...]  # as all ranks agreed on them
    offsets: tuple[int, ...]  # in elements
    elements: int  # of the whole bucket, padding included
    response: Response  # to carry out when the bucket is released


class Layout(Message, frozen=True, kw_only=True):
    """How a gradient set is cut into buckets."""

    layout_id: int  # never used again
    label: str
    first_round: int  # the set's first round that is reported by bucket
    buckets: tuple[Bucket, ...]
    unbucketed: tuple[str, ...] = ()  # members that are never put into a bucket: they were sparse once, on some rank


class Mailbox(Message, frozen=True, kw_only=True):
    """Shared memory through which threads that block in a collective exchange values without the coordinator.

    See `negotiation/mailboxes.py`.
    """

    mailbox_id: int  # never used again
    stem: str  # of the names of its tensors: all but a number at the end
    process_set_id: int
    area: int  # where it is: 0, 1, 2, ...; the next number is a new area, a lower one belonged to a closed mailbox
    capacity: int  # bytes of the largest tensor
    first_round: int  # numbers of rounds are never used again in an area


class BucketRelease(Message, frozen=True, kw_only=True):
    """All ranks reported a bucket: reduce it."""

    bucket_id: int
    globally_unused: tuple[int, ...] = ()  # indices of members without a gradient on any rank; they are not written
    partly_unused: tuple[int, ...] = ()  # indices of members that some ranks have a gradient for, and others not
    ranks_in_step: tuple[int, ...] = ()  # as in `Response`


class Decision(Message, frozen=True, kw_only=True):
    """The orders of the coordinator to all ranks.

    Every rank applies the same decisions in the same order. Some fields take effect when the decision arrives, even in the
    middle of a collective; the others when the rank has applied all earlier decisions. The fields are declared in the order
    in which they take effect; `engine/decisions.py` applies them.
    """

    epoch: int
    sequence: int  # 1, 2, 3, ...: a gap is a lost decision, which ends the job

    # On arrival:
    failure: FailureNotice | None = None  # the job ends; nothing else of the decision counts
    status_requests: tuple[int, ...] = ()  # ranks that are to report their status
    left: tuple[int, ...] = ()  # ranks whose leaving is hereby accepted; such a rank ends when it has applied the decision
    deferred: tuple[int, ...] = ()  # ranks whose deferrable waits end here, unfinished
    pong: tuple[int, ...] = ()  # ranks that asked whether rank 0 is there: the arrival is the answer

    # In order. All planes open the process set of two ranks before `learned`, when it is first needed in `responses`.
    timeline: bool | None = None  # from here on every rank traces, or does not; None: as before
    tuned: tuple[tuple[str, int], ...] = ()  # knobs that have these values from here on
    closed: tuple[int, ...] = ()  # mailboxes that all members have frozen: what is unfinished in them becomes a request
    learned: tuple[Layout, ...] = ()
    released: tuple[BucketRelease, ...] = ()
    # Layouts that are not used until all ranks have joined; what was reported of them is answered member by member.
    suspended: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()  # layouts that end here; likewise
    opened: tuple[Mailbox, ...] = ()
    frozen: tuple[int, ...] = ()  # mailboxes to which no rank writes any more; every member answers with `MailboxFrozen`
    responses: tuple[Response, ...] = ()


class ReceiveSplits(Message, frozen=True):
    """The rows that one rank receives from each rank in an alltoall (Horovod: received splits)."""

    process_set_id: int
    name: str
    rows: tuple[int, ...]  # from each rank of the set
    offsets: tuple[int, ...]  # the first of them among the rows that each rank sends


class DirectMessage(Message, frozen=True, kw_only=True):
    """A message of rank 0 to one rank alone. It arrives before the decision to which it belongs, if any."""

    epoch: int  # as in `Decision`
    rank: int
    receive_splits: tuple[ReceiveSplits, ...] = ()  # in the order of their decisions
    oob_messages: tuple[OobMessage, ...] = ()


class DirectMessages(Message, frozen=True):
    """Direct messages to ranks with the same route."""

    messages: tuple[DirectMessage, ...]
