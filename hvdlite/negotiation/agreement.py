"""Do the ranks mean the same thing by one name? Pure comparison, and the sentence that explains a disagreement."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdlite.core.types import Collective
from hvdlite.negotiation.messages import Request

Aspect = tuple[str, Callable[[Request], object]]

_COMMON: tuple[Aspect, ...] = (
    ("operation", lambda request: request.collective.name.lower()),
    ("dtype", lambda request: request.dtype),
    ("device", lambda request: request.device),
    ("process set", lambda request: request.process_set),
)
_SPECIFIC: dict[Collective, tuple[Aspect, ...]] = {
    Collective.ALLREDUCE: (
        ("shape", lambda request: list(request.shape)),
        ("reduce op", lambda request: request.op.name.capitalize()),
        ("prescale_factor", lambda request: request.prescale),
        ("postscale_factor", lambda request: request.postscale),
    ),
    Collective.BROADCAST: (
        ("shape", lambda request: list(request.shape)),
        ("root rank", lambda request: request.root_rank),
    ),
    Collective.ALLGATHER: (
        ("number of dimensions", lambda request: len(request.shape)),
        ("shape after the first dimension", lambda request: list(request.shape[1:])),
    ),
    Collective.BARRIER: (),
}


def disagreement(requests: Mapping[int, Request]) -> str | None:
    """Return a sentence naming the ranks and their values, or None when all ranks agree.

    Args:
        requests: each rank's request for one name; not empty.
    """
    first = next(iter(requests.values()))
    for what, value_of in (*_COMMON, *_SPECIFIC[first.collective]):
        groups: dict[str, list[int]] = {}
        for rank in sorted(requests):
            groups.setdefault(str(value_of(requests[rank])), []).append(rank)
        if len(groups) > 1:
            told = "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in groups.items())
            return (f"ranks disagree about the {what} of '{first.name}': {told}. Nothing was changed on any rank; "
                    "call it with the same value everywhere, or use different names")
    return None


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"
