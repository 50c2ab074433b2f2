"""The table of data planes: what each supports, whether it can be used here, and which one a job uses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping

from hvdlite.core.array import SUPPORTED_DTYPES, check_reducible
from hvdlite.core.errors import LaunchError, UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.core.world import Hosts
from hvdlite.planes import gloo, mpi
from hvdlite.planes.nccl import collectives as nccl
from hvdlite.planes.nccl import library

REDUCTIONS = (Collective.ALLREDUCE, Collective.REDUCE, Collective.REDUCESCATTER)
MOVES = (Collective.BROADCAST, Collective.ALLGATHER, Collective.GATHER, Collective.SCATTER, Collective.ALLTOALL,
         Collective.SEND)
OPS = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.ADASUM)


@dataclasses.dataclass(frozen=True)
class PlaneInfo:
    """A data plane in diagnostics and documentation."""

    name: str
    device: str
    where: str
    supports: Callable[[Collective, ReduceOp | None, str], bool]  # given the op (if any) and the dtype
    unavailable_reason: Callable[[], str]  # why it cannot be used here and what to do; "" if it can


def host_supports(collective: Collective, op: ReduceOp | None, dtype: str) -> bool:
    """Return whether host planes support an operation: they support every meaningful one."""
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
    if sys.byteorder != "little":
        return "its counters need a little-endian processor"
    return ""


PLANES = (
    PlaneInfo("loopback", "cpu", "ranks as threads of one process, and a job of size 1", host_supports, lambda: ""),
    PlaneInfo("shm", "cpu", "processes of one host", host_supports, _no_shared_memory),
    PlaneInfo("mpi", "cpu", "processes that mpirun started, on one or several hosts", host_supports, mpi.unavailable_reason),
    PlaneInfo("gloo", "cpu", "processes of several hosts, without MPI", host_supports, gloo.unavailable_reason),
    PlaneInfo("hierarchical", "cpu", "hosts of several processes: shm inside, mpi or gloo between", host_supports,
              lambda: gloo.unavailable_reason() and mpi.unavailable_reason()),
    PlaneInfo("nccl", "cuda", "NVIDIA GPUs, of one host or several", nccl.supports, library.installation_problem),
)


BACKENDS = ("mpi", "gloo")
"""The backends for tensors between hosts; the first one that can be used is chosen."""


@dataclasses.dataclass(frozen=True)
class PlaneChoice:
    """The plane chosen for tensors in host memory, with the reasons.

    Attributes:
        cross_backend: the backend of a hierarchical plane between hosts.
    """

    name: str
    cross_backend: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        name = f"{self.name} ({self.cross_backend} between hosts)" if self.cross_backend else self.name
        return f"tensors in host memory travel by {name}: {'; '.join(self.reasons)}"


def choose_plane(wanted: str, hosts: Hosts, unavailable: Mapping[str, str]) -> PlaneChoice:
    """Choose the plane for tensors in host memory.

    Args:
        wanted: HVDLITE_CPU_OPERATIONS.
        unavailable: reasons by backend that some rank cannot use; equal on all ranks.

    Raises:
        LaunchError: if the wanted plane or every plane is unavailable, with installation advice.
    """
    sizes = list(map(len, hosts.ranks_by_host))
    where = "one host" if len(sizes) == 1 else f"{len(sizes)} hosts of {sizes} ranks"
    asked = () if wanted == "auto" else (f"HVDLITE_CPU_OPERATIONS={wanted}",)
    if wanted in BACKENDS:
        if wanted in unavailable:
            raise LaunchError(f"HVDLITE_CPU_OPERATIONS={wanted} is not possible: {unavailable[wanted]}")
        return PlaneChoice(wanted, "", asked)
    if len(sizes) == 1:
        why = "the ranks share one host" if not asked or wanted == "shm" else "and all ranks share one host"
        return PlaneChoice("shm", "", (*asked, why))
    if wanted == "shm":
        raise LaunchError(f"HVDLITE_CPU_OPERATIONS=shm is not possible: the ranks are on {where}")
    cross_backend = next((backend for backend in BACKENDS if backend not in unavailable), "")
    if not cross_backend:
        raise LaunchError(f"the ranks are on {where}, and nothing can carry tensors between them: "
                          + "; ".join(f"{backend}: {reason}" for backend, reason in unavailable.items()))
    passed_over = [f"not {backend}: {unavailable[backend]}" for backend in BACKENDS[:BACKENDS.index(cross_backend)]]
    if max(sizes) == 1 and not asked:
        return PlaneChoice(cross_backend, "", (f"the ranks are on {where}", *passed_over))
    return PlaneChoice("hierarchical", cross_backend, (*asked, f"the ranks are on {where}", *passed_over))


def operations() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of the table of operations: the operation, and the supported dtypes by plane."""
    rows = [(collective, op) for collective in REDUCTIONS for op in OPS] + [(collective, None) for collective in MOVES]
    for collective, op in rows:
        name = collective.name.lower() + (f" {op.name.capitalize()}" if op is not None else "")
        cells = {plane.name: _dtypes([dtype for dtype in SUPPORTED_DTYPES if plane.supports(collective, op, dtype)])
                 for plane in PLANES}
        if any(cell != "none" for cell in cells.values()):
            yield name, cells
    yield "barrier", {plane.name: "yes" for plane in PLANES}
    yield "join", {plane.name: "yes" for plane in PLANES}


def _dtypes(supported: list[str]) -> str:
    """Return a short text that names dtypes."""
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
