"""Planes against the raw libraries they stand on: allreduce (Sum) of one float32 array, in place.

    mpi, gloo      the plane itself, without the negotiation before it, beside mpi4py's Allreduce and torch.distributed
    job            the whole way through `hvd.allreduce_`, on the plane that HVDLITE_CPU_OPERATIONS names, beside the same

`run.py` starts it under mpiexec; and for two hosts of two ranks, where the whole way by the hierarchical plane is to be
compared with the whole way by its backend between all ranks at once, the flat way. With Gloo these hosts are network
namespaces with a gigabit between them; with MPI they are simulated by MPICH, and nothing is slower between them than inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

import hvdlite_torch as hvd
from benchmarks.harness import Bench, median, say
from hvdlite.api import runtime
from hvdlite.control.star import yield_processor
from hvdlite.core.array import Array
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import Plan, Plane
from hvdlite.planes.gloo import gloo_plane
from hvdlite.planes.mpi import mpi_plane

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
SHORT = [1 << 20, 16 << 20]

Work = Callable[[], object]


class Bare:
    """A plane that waits as the runtime does while the script is blocked, but for messages, of which there are none."""

    def __init__(self, plane: Callable[[Bare], Plane]) -> None:
        self._bell = threading.Event()
        self.wake = self._bell.set
        self._plane = plane(self)
        self._plane.add_process_set(0, tuple(range(hvd.size())))
        self._count = 0

    def allreduce(self, values: Array) -> Work:
        """Return what reduces an array, as it was negotiated before."""
        everybody = tuple(range(hvd.size()))
        response = Response(names=("x",), collective=Collective.ALLREDUCE, dtype="float32", op=ReduceOp.SUM,
                            contributors=everybody, elements=values.size)

        def work() -> None:
            self._count += 1
            self._plane.execute(Plan(self._count, everybody, response, [values], [values]), self._wait_until)

        return work

    def close(self) -> None:
        self._plane.close()

    def _wait_until(self, predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        while not predicate():
            if poll_interval:
                yield_processor()
            else:
                self._bell.wait(1.0)
                self._bell.clear()


class StoreNotes:
    """Notes of planes in the store of torch's own process group."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()

    def publish(self, label: str, text: bytes) -> None:
        self._store.set(f"{label}/{hvd.rank()}", text)

    def fetch(self, label: str, sender: int, wait_until: object, is_cancelled: object = None) -> bytes:
        text: bytes = self._store.get(f"{label}/{sender}")
        return text

    def look(self) -> None:
        pass

    def withdraw(self, label: str) -> None:
        pass

    def consult(self, *arguments: object) -> bytes:
        raise NotImplementedError("only NCCL's plane consults")


def competitions(bench: Bench, nbytes: int, bare: dict[str, Bare]) -> Iterator[tuple[str, dict[str, Work]]]:
    """Yield what competes with what."""
    ours, theirs = (np.zeros(nbytes // 4, np.float32) for _ in range(2))
    tensor, mine = torch.from_numpy(theirs), torch.from_numpy(ours)
    raw: dict[str, Work] = {"raw gloo": lambda: dist.all_reduce(tensor)}
    if bench.mpi is not None:
        from mpi4py import MPI
        raw["raw mpi4py"] = lambda: bench.mpi.Allreduce(MPI.IN_PLACE, theirs)
    for name, plane in bare.items():
        library = {"gloo": "raw gloo", "mpi": "raw mpi4py"}[name]
        yield name, {"hvdlite": plane.allreduce(ours), library: raw[library]}
    yield f"job, {runtime().plane.name}", {"hvdlite": lambda: hvd.allreduce_(mine, op=hvd.Sum, name="x"), **raw}


def main() -> None:
    bench = Bench.start(__doc__ or "", job="only the whole way")
    bare = {}
    if not bench.arguments.job:
        bare["gloo"] = Bare(lambda bare: gloo_plane(hvd.rank(), StoreNotes(), bare.wake, "127.0.0.1", timeout=60,
                                                    chunk=512 << 10))
        if bench.mpi is not None:
            bare["mpi"] = Bare(lambda bare: mpi_plane(bench.mpi.Dup(), chunk=512 << 10))
    rows = []
    for nbytes in SHORT if bench.arguments.short else SIZES:
        for case, contenders in competitions(bench, nbytes, bare):
            seconds = {name: median(values) for name, values in bench.interleave(contenders).items()}
            rows.append({"case": case, "bytes": nbytes, "seconds": seconds})
            say(f"{case:24} {nbytes:>10} B  " + "  ".join(f"{name} {value * 1e6:9.1f} us" for name, value in seconds.items())
                + "".join(f"   x{name} {seconds['hvdlite'] / seconds[name]:.2f}" for name in seconds if name != "hvdlite"))
    for plane in bare.values():
        plane.close()
    bench.finish(rows)


if __name__ == "__main__":
    main()
