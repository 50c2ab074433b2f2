"""Enumerations: the collectives and the reduce operations."""

from __future__ import annotations

import enum


class ReduceOp(enum.IntEnum):
    """How an allreduce combines the ranks' values; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        names = ", ".join(f"hvd.{op.name.capitalize()}" for op in cls)
        raise ValueError(f"op must be one of {names}, not {value!r}")


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
"""The collectives in which one rank, the root, has a part of its own; of a send it is the sender."""
