"""Collectives and reduce operations."""

from __future__ import annotations

import enum
import warnings


class ReduceOp(enum.IntEnum):
    """The operation of a reduction; the values up to PRODUCT are Horovod's, the bitwise ones are for `torch.distributed`."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BAND = 6
    BOR = 7
    BXOR = 8

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        names = ", ".join(f"hvd.{op.name.capitalize()}" for op in cls if op not in BITWISE)
        raise ValueError(f"op must be one of {names}, not {value!r}")


BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
"""The operations on the bits of integers."""


class Collective(enum.IntEnum):
    """The operations that ranks negotiate."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    BARRIER = 3
    REDUCESCATTER = 4
    ALLTOALL = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    ADD_PROCESS_SET = 9
    REMOVE_PROCESS_SET = 10
    JOIN = 11
    SEND = 12


ROOTED = frozenset({Collective.BROADCAST, Collective.REDUCE, Collective.GATHER, Collective.SCATTER, Collective.SEND})
"""The collectives with a root rank; the root of a send is the sender."""


def reduce_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation that Horovod's arguments `op` and `average` select; the default is Average.

    Raises:
        ValueError: when both are given.
        TypeError: when `average` is an operation or its name.
    """
    if average is not None:
        if isinstance(average, str | ReduceOp):  # both would be true
            raise TypeError(f"average is True or False, not {average!r}: pass an operation as op=hvd.Sum, "
                            "a name as name=...")
        if op is not None:
            raise ValueError("pass either op or the deprecated average, not both")
        warnings.warn("average is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    return ReduceOp.AVERAGE if op is None else ReduceOp(op)
