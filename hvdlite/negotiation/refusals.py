"""The errors by which the coordinator refuses a tensor on all ranks, and how to avoid them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hvdlite.negotiation.agreement import named_ranks
from hvdlite.negotiation.messages import ErrorKind, Request, Response


def refusal(request: Request, text: str, kind: ErrorKind = ErrorKind.MISMATCH) -> Response:
    """Return the response that refuses a request."""
    return Response(names=(request.name,), collective=request.collective, dtype=request.dtype,
                    process_set_id=request.process_set_id, round_id=request.round_id, error=kind, error_text=text)


def in_removed_set(request: Request) -> str:
    """Explain that a request's process set has been removed."""
    return f"'{request.name}' was called on process set {request.process_set_id}, which has been removed"


def of_round_before_join(request: Request, ranks: Sequence[int]) -> str:
    """Explain that a round of a gradient set was not finished before `join()`."""
    return (f"'{request.name}' belongs to a round that was under way on {named_ranks(ranks)} when all ranks had joined; "
            "wait for the gradients before join()")


def send_to_joined(request: Request, joined: int) -> str:
    """Explain that one of the two ranks of a send has joined."""
    return f"'{request.name}' needs rank {joined}, which has joined and neither sends nor receives"


def root_has_joined(request: Request) -> str:
    """Explain that the root of a collective has joined."""
    return (f"'{request.name}' has root rank {request.root_rank}, which has joined and contributes nothing; choose a root "
            "that is still active")


def set_removed_under_way(request: Request, ranks: Collection[int]) -> str:
    """Explain that a process set was removed while a tensor was pending in it."""
    return (f"'{request.name}' was under way on {named_ranks(sorted(ranks))} when process set {request.process_set_id} was "
            "removed; wait for everything on a set before removing it")


def not_shared(request: Request, ranks: Collection[int], missing: Sequence[int]) -> str:
    """Explain that some ranks do not have a member of a gradient set."""
    return (f"ranks disagree about the members of '{request.label}': {named_ranks(sorted(ranks))}: reduces "
            f"'{request.name}' in round {request.round_id}; {named_ranks(missing)}: does not have it. Give the optimizer "
            "the same parameters on all ranks (add_param_group and requires_grad too)")


def needs_left_rank(request: Request, members: Sequence[int], left: Collection[int], size: int) -> str:
    """Explain that a rank of the process set has left the job."""
    needed = "all ranks" if len(members) == size else f"ranks {list(members)}"
    return (f"'{request.name}' needs {needed}, but {named_ranks(sorted(set(left).intersection(members)))} left the job "
            "normally (script ended, or shutdown() called)")
