"""Which data planes there are, what each can do, and why one cannot be used here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator

from hvdlite.core.array import SUPPORTED_DTYPES, check_reducible
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import Collective, ReduceOp

REDUCTIONS = (Collective.ALLREDUCE, Collective.REDUCE, Collective.REDUCESCATTER)
MOVES = (Collective.BROADCAST, Collective.ALLGATHER, Collective.GATHER, Collective.SCATTER, Collective.ALLTOALL,
         Collective.SEND)
OPS = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.ADASUM)


@dataclasses.dataclass(frozen=True)
class PlaneFacts:
    """A data plane as users know it."""

    name: str
    device: str
    where: str
    carries: Callable[[Collective, ReduceOp | None, str], bool]  # with that op, if any, and dtype
    missing: Callable[[], str]  # why it cannot be used here, and what to do; "" when it can


def carries_on_host(collective: Collective, op: ReduceOp | None, dtype: str) -> bool:
    """Say what the planes that reduce with NumPy can do: everything that has a meaning."""
    if op is None:
        return True
    if op is ReduceOp.ADASUM and collective is Collective.REDUCESCATTER:
        return False
    try:
        check_reducible(dtype, op, "it")
    except UnsupportedError:
        return False
    return True


def _no_shared_memory() -> str:
    if not hasattr(os, "memfd_create"):
        return "it runs on an unlinked file here, which nobody has tested yet"
    if sys.byteorder != "little":
        return "its counters need a little-endian processor"
    return ""


PLANES = (
    PlaneFacts("loopback", "cpu", "ranks as threads of one process, and a job of size 1", carries_on_host, lambda: ""),
    PlaneFacts("shm", "cpu", "processes of one host", carries_on_host, _no_shared_memory),
)


def operations() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of the table of operations: what it is, and by plane which dtypes work."""
    rows = [(collective, op) for collective in REDUCTIONS for op in OPS] + [(collective, None) for collective in MOVES]
    for collective, op in rows:
        name = collective.name.lower() + (f" {op.name.capitalize()}" if op is not None else "")
        cells = {plane.name: _dtypes([dtype for dtype in SUPPORTED_DTYPES if plane.carries(collective, op, dtype)])
                 for plane in PLANES}
        if any(cell != "none" for cell in cells.values()):
            yield name, cells
    yield "barrier", {plane.name: "yes" for plane in PLANES}
    yield "join", {plane.name: "yes" for plane in PLANES}


def _dtypes(supported: list[str]) -> str:
    """Name dtypes in the shortest way."""
    kinds = {"bool": ["bool"], "integers": [name for name in SUPPORTED_DTYPES if "int" in name],
             "floats": [name for name in SUPPORTED_DTYPES if "float" in name],
             "complex": [name for name in SUPPORTED_DTYPES if "complex" in name]}
    words = [kind for kind, names in kinds.items() if set(names) <= set(supported)]
    rest = [name for name in supported if not any(name in kinds[kind] for kind in words)]
    if len(words) == len(kinds):
        return "all dtypes"
    if len(words) == len(kinds) - 1 and not rest:
        return f"all but {next(kind for kind in kinds if kind not in words)}"
    return ", ".join(words + rest) or "none"
