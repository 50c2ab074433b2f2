"""Allreduce of one private float32 tensor, in place, from 4 bytes up: hvdlite, torch.distributed (Gloo), MPI, Horovod."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import hvdlite_torch as hvd
from benchmarks.harness import Bench, median, say, tail

SIZES = [4, 64, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
SHORT = [4, 8 << 10, 1 << 20, 64 << 20]


def contenders(bench: Bench, nbytes: int) -> dict[str, Callable[[], object]]:
    """Return what competes; each works on its own tensor and averages or sums as it does natively."""
    ours, theirs, native = (torch.zeros(nbytes // 4) for _ in range(3))
    found: dict[str, Callable[[], object]] = {
        "hvdlite": lambda: hvd.allreduce_(ours, op=hvd.Sum, name="x"),
        "gloo": lambda: dist.all_reduce(theirs),
    }
    if bench.mpi is not None:
        from mpi4py import MPI
        array = native.numpy()
        found["mpi"] = lambda: bench.mpi.Allreduce(MPI.IN_PLACE, array)
    if bench.horovod is not None:
        other = torch.zeros(nbytes // 4)
        found["horovod"] = lambda: bench.horovod.allreduce_(other, op=bench.horovod.Sum, name="x")
    return found


def main() -> None:
    bench = Bench.start(__doc__)
    rows = []
    for nbytes in SHORT if bench.arguments.short else SIZES:
        found = contenders(bench, nbytes)
        seconds = {name: median(values) for name, values in bench.interleave(found).items()}
        tails = {name: {f"p{round(100 * share)}": tail(calls, share) for share in (0.95, 0.99)}
                 for name, calls in bench.calls.items()}
        rows.append({"bytes": nbytes, "seconds": seconds, "tails": tails})
        say(f"{nbytes:>11} B  " + "  ".join(f"{name} {value * 1e6:10.1f} us" for name, value in seconds.items())
            + "".join(f"   x{name} {seconds['hvdlite'] / seconds[name]:.2f}" for name in seconds if name != "hvdlite")
            + "   p99 " + " ".join(f"{name} {each['p99'] * 1e6:.0f}" for name, each in tails.items()))
    bench.finish(rows)


if __name__ == "__main__":
    main()
