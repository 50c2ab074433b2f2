"""Fusion: which ready tensors are moved together. Pure: the same requests always give the same responses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.gathering import first_of, grouped
from hvdlite.negotiation.messages import ReceiveSplits, Request, Response

FUSIBLE = (Collective.ALLREDUCE, Collective.BROADCAST)
_SCATTERS = (Collective.REDUCESCATTER, Collective.SCATTER)
_GATHERS = (Collective.ALLGATHER, Collective.GATHER)


def response_to(requests: Mapping[int, Request], members: Sequence[int]) -> Response:
    """Return the response to one tensor on which all ranks agree.

    Args:
        members: the ranks of the process set; those without a request have joined and contribute nothing.
    """
    first = first_of(requests)
    return Response(
        names=(first.name,), collective=first.collective, dtype=first.dtype, op=first.op, root_rank=first.root_rank,
        prescale=first.prescale, postscale=first.postscale, process_set_id=first.process_set_id, round_id=first.round_id,
        contributors=_contributors(requests, members),
        elements=math.prod(first.shape) if first.collective not in (*_GATHERS, Collective.ALLTOALL) else 0,
        rows=_rows(requests, members), row_elements=math.prod(first.shape[1:]), device=first.device,
        ranks_in_step=_ranks_in_step(requests),
    )


def _contributors(requests: Mapping[int, Request], members: Sequence[int]) -> tuple[int, ...]:
    groups = grouped(requests)
    if len(requests) == len(members) and not any(request.absent for _, request in groups):
        return tuple(members)
    return tuple(sorted(rank for ranks, request in groups if not request.absent for rank in ranks))


def _ranks_in_step(requests: Mapping[int, Request]) -> tuple[int, ...]:
    if not any(request.in_step for _, request in grouped(requests)):
        return ()
    return ranks_in_step({rank: request.in_step for rank, request in requests.items()})


def receive_splits(requests: Mapping[int, Request], members: Sequence[int]) -> list[ReceiveSplits]:
    """Return the rows that each rank of the set receives in an alltoall on which all agree; see `response_to`."""
    first = first_of(requests)
    table = _table(requests, members)
    starts = table.cumsum(axis=1) - table
    return [ReceiveSplits(first.process_set_id, first.name, tuple(rows), tuple(begin))
            for rows, begin in zip(table.T.tolist(), starts.T.tolist(), strict=True)]


def ranks_in_step(in_step: Mapping[int, bool]) -> tuple[int, ...]:
    """Return the ranks that report a round from within their optimizer's step, unless all do.

    Args:
        in_step: by rank.
    """
    ranks = tuple(sorted(rank for rank, is_in_step in in_step.items() if is_in_step))
    return ranks if len(ranks) < len(in_step) else ()


def even_rows(rows: int, parts: int) -> tuple[int, ...]:
    """Return the rows of each part: as equal as possible, one more in the first parts."""
    return tuple(rows // parts + (part < rows % parts) for part in range(parts))


def _rows(requests: Mapping[int, Request], members: Sequence[int]) -> tuple[int, ...]:
    first = first_of(requests)
    if first.collective in _GATHERS:
        return tuple(requests[rank].shape[0] if rank in requests else 0 for rank in members)
    if first.collective is Collective.ALLTOALL:
        table = _table(requests, members)
        return int(table.sum(axis=1).max()), int(table.sum(axis=0).max())
    if first.collective in _SCATTERS:
        return even_rows(first.shape[0], len(members))
    if first.op is ReduceOp.ADASUM:
        return tuple(math.prod(shape) for shape in first.group or (first.shape,))
    return ()


def _table(requests: Mapping[int, Request], members: Sequence[int]) -> Array:
    """Return a row of `splits` for each rank; zeros for a rank that has joined."""
    nothing = (0,) * len(members)
    return np.array([requests[rank].splits if rank in requests else nothing for rank in members], np.int64)


def fuse(ready: Iterable[tuple[Response, int]], threshold: int) -> list[Response]:
    """Merge responses that a plane can execute as one, keeping the order of first members.

    Args:
        ready: single-tensor responses with their number of bytes, in the order they became ready.
        threshold: largest merged response in bytes; a larger tensor is not merged.
    """
    groups: list[list[Response]] = []
    open_groups: dict[tuple[object, ...], tuple[list[Response], int]] = {}
    for response, nbytes in ready:
        if response.result is not None:  # the decision carries its result
            groups.append([response])
            continue
        key = fusion_key(response)
        group, filled = open_groups.get(key, ([], threshold))
        if response.collective not in FUSIBLE or response.op is ReduceOp.ADASUM or not group or filled + nbytes > threshold:
            group, filled = [], 0
            groups.append(group)
        group.append(response)
        open_groups[key] = (group, filled + nbytes)
    return [group[0] if len(group) == 1 else _merged(group) for group in groups]


def payload_bytes(request: Request) -> int:
    """Return the number of bytes of a request's tensor."""
    return math.prod(request.shape) * SUPPORTED_DTYPES[request.dtype].itemsize


def fusion_key(response: Response) -> tuple[object, ...]:
    """Return a key that is equal for responses that can be executed as one."""
    return (response.collective, response.dtype, response.op, response.root_rank, response.prescale,
            response.postscale, response.process_set_id, response.round_id, response.divisor, response.contributors,
            response.device, response.ranks_in_step)


def _merged(group: list[Response]) -> Response:
    return msgspec.structs.replace(group[0], names=tuple(name for response in group for name in response.names),
                                   elements=sum(response.elements for response in group))
