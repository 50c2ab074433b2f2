"""The messages between ranks. These structures *are* the protocol; the control plane only carries them.

A rank sends a `Report` when it has something to say; the coordinator answers with `Decision`s, which every rank applies
in the same order. Everything that changes shared state travels in a decision.

A *gradient set* is the gradients of one wrapped optimizer (or tape): every rank reports each of its members exactly once
a *round*. A round in which they were reported one by one teaches the coordinator a *layout*: a fixed cut of the set into
*buckets*. From then on a rank reports one id when all members of a bucket are ready; see `negotiation/gradient_sets.py`.
"""

from __future__ import annotations

import enum

import msgspec

from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp

Key = tuple[int, str, int]
"""A tensor's process set, its name, and the round of its gradient set (0 when it belongs to none)."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, compact on the wire, validated when decoded."""


class Request(Message, frozen=True, tag=1):
    """One tensor, or one group of tensors, that is ready on one rank.

    Every field must agree between the ranks of the process set but `absent`, `strides`, `splits`, `payload` and, for
    gathers and alltoall, `shape[0]`.
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
    absent: bool = False  # this rank takes part but contributes nothing (a parameter without a gradient)
    group: tuple[tuple[int, ...], ...] = ()  # shapes of the members of a group, which is answered as one
    payload: bytes | None = None  # eager lane: an offer; the sender keeps its tensor
    label: str = ""  # the gradient set it belongs to, or ""
    round_id: int = 0  # of that set, counted from 1
    strides: tuple[int, ...] = ()  # how this rank lays out a member of a gradient set, in elements; () is row-major
    group_id: int = 0  # members of a gradient set with the same one, from 1, share a bucket
    step: int = 0  # of a gradient set: how many steps its optimizer has made, since all ranks have last joined
    in_step: bool = False  # of a gradient set: this rank takes part from within its optimizer's step

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
    """All members of a learned bucket are in their places on this rank."""

    bucket_id: int
    round_id: int  # of the gradient set, as in `Request`
    unused: tuple[int, ...] = ()  # indices of members without a gradient here; their places hold the op's identity
    ends_round: bool = False  # it was the set's last bucket of the round on this rank
    step: int = 0  # likewise
    in_step: bool = False  # likewise


class Wait(Message, frozen=True):
    """What a thread of a rank has been blocked on for long: one tensor, or a round of a gradient set."""

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


ReportItem = Request | BucketReady | RoundDone | LayoutStale | Retired
"""An item of a report, about tensors. Tags (positive integers) distinguish the types on the wire."""


class FailureNotice(Message, frozen=True):
    """Why the job ends: where it began and what was seen there."""

    origin: int  # the rank where it began, never one that passed it on
    kind: str  # "lost", or the type of the exception that rank raised
    message: str
    traceback: str = ""


class RankStatus(Message, frozen=True, kw_only=True):
    """What a rank says of itself when others wait for it."""

    location: str  # where its script is: function, file and line
    stack: str
    recent: tuple[str, ...]  # names of its last collectives, oldest first
    first_number: int  # the number of the first of them, counted from 1
    waiting: tuple[str, ...]  # names of what it has submitted and not got back


class TraceEvent(Message, frozen=True):
    """One event of the timeline, as in Chrome's trace format."""

    phase: str  # B: a span begins, E: the innermost one ends, i: an instant; "end": this rank traces no more
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
    """What a rank says that has nothing to do with one tensor."""

    status: RankStatus | None = None  # the answer to a status request
    ping: bool = False  # is rank 0 there? It is to answer with a decision
    slow_peers: tuple[int, ...] = ()  # with these it has long been in the middle of a collective
    requests_report: bool = False  # its user asks who waits for whom
    trace: tuple[TraceEvent, ...] = ()  # while there is a timeline
    oob_messages: tuple[OobMessage, ...] = ()
    oob_requests: tuple[OobKey, ...] = ()  # messages of other ranks that it fetches
    oob_withdrawn: tuple[str, ...] = ()  # labels of its own messages that no rank will fetch any more


class Blocked(Message, frozen=True):
    """A rank's threads have been blocked in waits for long. An answer to what they wait for makes that void."""

    waits: tuple[Wait, ...]  # one for each blocked thread; empty when a wait was interrupted
    entirely: bool = True  # the rank has no other Python thread, which might call something that lets others go on


class Report(Message, frozen=True, kw_only=True):
    """What one rank tells the coordinator."""

    epoch: int  # membership epoch; a report of another epoch is dropped
    applied: int  # the last decision this rank has applied
    items: tuple[ReportItem, ...] = ()  # in the order in which they happened on this rank
    side_message: SideMessage | None = None
    leaving: bool = False  # this rank will submit nothing more, after what it says here
    failure: FailureNotice | None = None
    blocked: Blocked | None = None  # replaces what it said of this before; after everything else


class RankReport(Message, frozen=True, tag=5):
    """A report of one rank of a host that differs from the other ranks' reports; the leader passes it on."""

    rank: int
    report: Report


class MergedRequests(Message, frozen=True, tag=7):
    """Some ranks of a host made the same requests."""

    ranks: tuple[int, ...]
    requests: tuple[Request, ...]


class HostReport(Message, frozen=True, kw_only=True):
    """What the leader of a host passes on: what all its ranks said alike as one, the rest rank by rank."""

    applied: int  # the least of its ranks
    # In the order in which it was said; what several ranks said stands where the last of them said it. A bucket or a
    # finished round is of all ranks of the host in the process set; a bucket's `unused` is what is unused on all of them.
    items: tuple[RankReport | MergedRequests | BucketReady | RoundDone, ...] = ()
    lost: tuple[tuple[int, str], ...] = ()  # ranks whose end it has seen, and what it saw


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
    elements: int = 0  # of all tensors together, where all ranks have the same: so a joined rank can do its share
    divisor: int = 0  # what Average divides by; 0 is the number of ranks in the process set
    contributors: tuple[int, ...] = ()  # ranks of the job, ascending; one not listed is skipped by the reduction
    # Gathers: what each rank of the set has; scatters: what it gets; alltoall: the most that a rank sends, and gets. Adasum:
    # the elements of each tensor. ADD_PROCESS_SET: the set's id. JOIN: the last rank.
    rows: tuple[int, ...] = ()
    row_elements: int = 0  # of those rows
    members: tuple[int, ...] = ()  # ADD_PROCESS_SET: as in the requests
    error: ErrorKind = ErrorKind.NONE
    error_text: str = ""
    result: bytes | None = None  # eager lane: the result itself
    device: str = "cpu"  # where the tensors are, as in the requests
    # Of a gradient set: ranks that took part from within their step, when others did not
    ranks_in_step: tuple[int, ...] = ()


class Bucket(Message, frozen=True, kw_only=True):
    """Members of a gradient set that travel together, and where each lies in the bucket."""

    bucket_id: int  # never used again, even after eviction
    members: tuple[Request, ...]  # as they were agreed on: equal on all ranks
    offsets: tuple[int, ...]  # in elements
    elements: int  # of the whole bucket, padding included
    response: Response  # what its release means


class Layout(Message, frozen=True, kw_only=True):
    """A gradient set's cut into buckets."""

    layout_id: int  # never used again
    label: str
    first_round: int  # the set's first round that is reported by bucket
    buckets: tuple[Bucket, ...]
    unbucketed: tuple[str, ...] = ()  # members that always go by themselves: they were sparse once, on some rank


class BucketRelease(Message, frozen=True, kw_only=True):
    """All ranks reported a bucket: reduce it."""

    bucket_id: int
    globally_unused: tuple[int, ...] = ()  # members to which no rank contributed; they keep what they have
    ranks_in_step: tuple[int, ...] = ()  # as in `Response`


class Decision(Message, frozen=True, kw_only=True):
    """What the coordinator orders; all ranks apply the same decisions in the same order, and each from top to bottom."""

    epoch: int
    sequence: int  # 1, 2, 3, ...: a gap is a lost decision, which ends the job
    learned: tuple[Layout, ...] = ()
    released: tuple[BucketRelease, ...] = ()
    # Layouts that are not used until all ranks have joined; what was reported of them is answered member by member.
    suspended: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()  # layouts that end here; likewise
    responses: tuple[Response, ...] = ()
    status_requests: tuple[int, ...] = ()  # ranks that are to report their status
    left: tuple[int, ...] = ()  # ranks whose leaving is hereby accepted
    pong: tuple[int, ...] = ()  # ranks that asked whether rank 0 is there
    timeline: bool | None = None  # from here on every rank traces, or does not; None: as before
    tuned: tuple[tuple[str, int], ...] = ()  # knobs that have these values from here on, before anything else
    failure: FailureNotice | None = None
    deferred: tuple[int, ...] = ()  # ranks whose deferrable waits end here, unfinished


class ReceiveSplits(Message, frozen=True):
    """The rows that one rank receives from each rank in an alltoall (Horovod: received splits)."""

    process_set_id: int
    name: str
    rows: tuple[int, ...]  # from each rank of the set
    offsets: tuple[int, ...]  # the first of them among the rows that each rank sends


class DirectMessage(Message, frozen=True, kw_only=True):
    """What the coordinator tells one rank alone. It comes before the decision to which it belongs, if it belongs to one."""

    rank: int
    receive_splits: tuple[ReceiveSplits, ...] = ()  # in the order of their decisions
    oob_messages: tuple[OobMessage, ...] = ()


class DirectMessages(Message, frozen=True):
    """Direct messages to ranks that are reached by the same way."""

    messages: tuple[DirectMessage, ...]
