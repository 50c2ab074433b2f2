"""What ranks say to each other. These structures *are* the protocol; the control plane only carries them.

A rank sends a `Report` when it has something to say; the coordinator answers with `Decision`s, which every rank applies
in the same order. Everything that changes shared state travels in a decision.

Fields marked "buckets" belong to learned buckets (PROTOCOL rules 2, 7, 9, 10). They travel from the first version so
that learning needs no second protocol; until buckets are learned they are empty, and a coordinator that receives a
bucket id it never gave out treats it as an error of the sender.
"""

from __future__ import annotations

import enum

import msgspec

from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, compact on the wire, validated when decoded."""


class Request(Message, frozen=True):
    """One tensor that is ready on one rank; everything but `absent` and `shape[0]` of a gather must agree."""

    name: str
    collective: Collective
    dtype: str
    shape: tuple[int, ...]
    op: ReduceOp = ReduceOp.SUM
    root_rank: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: int = GLOBAL_PROCESS_SET_ID
    device: str = "cpu"
    absent: bool = False  # this rank takes part but contributes nothing (a parameter without a gradient)


class BucketRound(Message, frozen=True):
    """One round of one learned bucket (buckets)."""

    bucket: int
    round: int


class FailureNotice(Message, frozen=True):
    """Why the job ends: where it began and what was seen there."""

    origin: int  # the rank where it began, never one that passed it on
    kind: str  # "lost", or the type of the exception that rank raised
    message: str
    traceback: str = ""


class Report(Message, frozen=True):
    """What one rank tells the coordinator."""

    epoch: int  # membership epoch; a report of another epoch is dropped
    applied: int  # the last decision this rank has applied
    retired: int  # the last decision whose shared memory this rank has finished reading
    requests: tuple[Request, ...] = ()
    buckets: tuple[BucketRound, ...] = ()  # buckets whose members are all ready here
    flushes: tuple[BucketRound, ...] = ()  # somebody here waits for a member of an unreported bucket (buckets)
    stale: tuple[int, ...] = ()  # buckets of which a member changed here (buckets)
    leaving: bool = False  # this rank will submit nothing more
    failure: FailureNotice | None = None


class ErrorKind(enum.IntEnum):
    """Which error a refused tensor raises."""

    NONE = 0
    MISMATCH = 1
    LEFT = 2


class Response(Message, frozen=True):
    """What every rank does with some tensors, in the order of `names`."""

    names: tuple[str, ...]
    collective: Collective
    dtype: str
    op: ReduceOp = ReduceOp.SUM
    root_rank: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: int = GLOBAL_PROCESS_SET_ID
    contributors: tuple[int, ...] = ()  # ascending; a rank not listed is skipped by the reduction
    rows: tuple[int, ...] = ()  # allgather: first dimension on each rank
    error: ErrorKind = ErrorKind.NONE
    error_text: str = ""


class Decision(Message, frozen=True):
    """What the coordinator orders; all ranks apply the same decisions in the same order."""

    epoch: int
    sequence: int  # 1, 2, 3, ...: a gap is a lost decision, which ends the job
    retired: int  # every rank has finished reading the shared memory of decisions up to this one
    responses: tuple[Response, ...] = ()
    broken: tuple[BucketRound, ...] = ()  # rounds to be completed tensor by tensor (buckets)
    evicted: tuple[int, ...] = ()  # buckets that no longer exist (buckets)
    left: tuple[int, ...] = ()  # ranks whose leaving is hereby accepted
    failure: FailureNotice | None = None
