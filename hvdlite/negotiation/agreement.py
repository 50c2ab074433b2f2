"""The check that ranks agree about a tensor, and the errors by which it is refused, with how to avoid them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from hvdlite.core.types import Collective
from hvdlite.negotiation.gathering import first_of, grouped
from hvdlite.negotiation.messages import ErrorKind, Request, Response

Aspect = tuple[str, Callable[[Request], object]]
STEPS = "number of optimizer steps before the reduction"
SHARDED = "value of sharded= for the optimizer"
_HINTS = {STEPS: "The ranks made different numbers of backward passes between two steps, or some of them replaced "
                 "gradients after their reduction, so one rank's gradients met another's of the next step. Do the same on "
                 "all ranks. For passes over different parameters, DistributedOptimizer(wait_in=\"step\") reduces once a "
                 "step",
          SHARDED: "Pass the same sharded= to DistributedOptimizer on all ranks"}
_SPARSE = ("One rank's gradient is sparse (gathered row by row), another's is dense. Pass sparse_as_dense=True to the "
           "optimizer or tape")
_WEIGHTS = ("Weights make an average a sum, which is divided by them: call optimizer.set_weight(n) before every backward() "
            "on all ranks, or on none (TensorFlow and Keras: weight=n)")
_GENERAL_HINT = "Nothing was changed on any rank; call it with the same value everywhere, or use different names"

_COMMON: tuple[Aspect, ...] = (
    ("operation", lambda request: request.collective.name.lower()),
    ("dtype", lambda request: request.dtype),
    ("device", lambda request: request.device),
    ("process set", lambda request: request.process_set_id),
    (SHARDED, lambda request: request.sharded),
    (STEPS, lambda request: request.step),
)
_REDUCTION: tuple[Aspect, ...] = (
    ("number of tensors in the group", lambda request: len(request.group)),
    ("shape", lambda request: [] if request.group else list(request.shape)),  # members are compared one by one
    ("reduce op", lambda request: request.op.name.capitalize()),
    ("prescale_factor", lambda request: request.prescale),
    ("postscale_factor", lambda request: request.postscale),
    ("group of parameters", lambda request: request.group_id),
)
_ROOT: Aspect = ("root rank", lambda request: request.root_rank)
_ROWS: tuple[Aspect, ...] = (
    ("number of dimensions", lambda request: len(request.shape)),
    ("shape after the first dimension", lambda request: list(request.shape[1:])),
)
_SPECIFIC: dict[Collective, tuple[Aspect, ...]] = {
    Collective.ALLREDUCE: _REDUCTION,
    Collective.BROADCAST: (("shape", lambda request: list(request.shape)), _ROOT),
    Collective.ALLGATHER: _ROWS,
    Collective.SEND: (("shape", lambda request: list(request.shape)), _ROOT),
    Collective.BARRIER: (),
    Collective.JOIN: (),
    Collective.REDUCESCATTER: _REDUCTION,
    Collective.REDUCE: (*_REDUCTION, _ROOT),
    Collective.ALLTOALL: _ROWS,
    Collective.GATHER: (*_ROWS, _ROOT),
    Collective.SCATTER: (("shape", lambda request: list(request.shape)), _ROOT),
    Collective.ADD_PROCESS_SET: (("ranks of the new process set", lambda request: list(request.members)),),
    Collective.REMOVE_PROCESS_SET: (("process set to remove", lambda request: list(request.members)),),
}


def reconciled(requests: Mapping[int, Request]) -> Mapping[int, Request]:
    """Turn requests without a gradient into sparse ones when another rank's gradient is sparse.

    Args:
        requests: each rank's request for one member of a gradient set; a sparse gradient is gathered row by row.
    """
    sparse = next((request for _, request in grouped(requests) if request.collective is Collective.ALLGATHER), None)
    if sparse is None:
        return requests
    nothing = msgspec.structs.replace(sparse, shape=(0, *sparse.shape[1:]))
    return {rank: nothing if request.absent else request for rank, request in requests.items()}


def disagreement(requests: Mapping[int, Request]) -> str | None:
    """Return a sentence naming the ranks and their values, or None when all ranks agree.

    Args:
        requests: each rank's request for one name; not empty.
    """
    first = first_of(requests)
    signature = _signature(first)
    if all(request == first or _signature(request) == signature for _, request in grouped(requests)):
        return None
    for what, value_of in (*_COMMON, *_SPECIFIC[first.collective], *_members(first, requests)):
        groups: dict[str, list[int]] = {}
        for rank in sorted(requests):
            groups.setdefault(str(value_of(requests[rank])), []).append(rank)
        if len(groups) > 1:
            values = "; ".join(f"{named_ranks(ranks)}: {value}" for value, ranks in groups.items())
            of_gradients = {"operation": _SPARSE, "reduce op": _WEIGHTS} if first.label else {}
            hint = of_gradients.get(what) or _HINTS.get(what, _GENERAL_HINT)
            return f"ranks disagree about the {what} of '{first.name}': {values}. {hint}"
    return None


def _signature(request: Request) -> tuple[object, ...]:
    """Return a key; requests with equal keys agree. Some collectives need less."""
    return (request.collective, request.dtype, request.shape, request.op, request.root_rank, request.prescale,
            request.postscale, request.process_set_id, request.device, request.group, request.members, request.group_id,
            request.step, request.sharded)


def _members(first: Request, requests: Mapping[int, Request]) -> tuple[Aspect, ...]:
    """Return an aspect for the first tensor of a group whose shape differs between ranks."""
    for index, shape in enumerate(first.group):
        if any(request.group[index:index + 1] != (shape,) for request in requests.values()):
            return ((f"shape of tensor {index} of the group", lambda request, at=index: list(request.group[at])),)
    return ()


def named_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 5"; at most eight ranks are named."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"


# --- refusals: the errors on all ranks, and how to avoid them --------------------------------------------------------------

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
            f"normally (script ended, or shutdown() called). Call it on {needed}, the same number of times")
