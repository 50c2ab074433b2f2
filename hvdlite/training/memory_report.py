"""What each rank uses its memory for: the model, its gradients, the optimizer, and hvdlite's buckets and staging memory."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvdlite.api import runtime as current_runtime
from hvdlite.diagnostics.progress import peak_memory, resident_memory

PARTS = ("parameters", "gradients", "optimizer", "owned", "buckets", "staging", "process", "peak")


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes by part and rank; `str` is a table.

    Attributes:
        ranks: for each rank, bytes by part: `parameters` (with buffers), `gradients` (outside of buckets), `optimizer`,
            `owned` (parameters of a sharded optimizer of which this rank has the state; 0 for others, and not in the table),
            `buckets` (gradients that lie in hvdlite's buckets), `staging` (hvdlite's memory for other tensors, with its
            mailboxes), `process` (what the process has in memory now, all in all; 0 where that is not known), `peak` (the
            most it has had). Activations are in the last two only: a batch of one size does not tell what a sample needs;
            `hvdrun --sweep batch-size=...` does.
        note: why ranks own unequal parts, if one parameter is the reason; it ends the table.
    """

    ranks: tuple[dict[str, int], ...]
    note: str = ""

    def __str__(self) -> str:
        shown = [part for part in PARTS if part != "owned" or any(parts[part] for parts in self.ranks)]
        cells = [["rank", *(f"{part}, MiB" for part in shown)]]
        cells += [[str(rank), *(f"{parts[part] / 2**20:,.1f}" for part in shown)] for rank, parts in enumerate(self.ranks)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([*rows, self.note] if self.note else rows)


def gather_report(parameters: int, gradients: int, optimizer: int, owned: int = 0, note: str = "") -> MemoryReport:
    """Return the report of all ranks, all of which call this.

    Args:
        parameters, gradients, optimizer, owned: bytes on this rank.
        note: see `MemoryReport`.

    Raises:
        HorovodInternalError: like every collective.
    """
    runtime = current_runtime()
    process = resident_memory("self")
    peak = max(process, peak_memory())
    buckets = sum(memory.nbytes for memory in runtime.bucket_memory())
    own = np.array([[parameters, gradients, optimizer, owned, buckets, runtime.staging_bytes(), process, peak]], np.int64)
    rows = runtime.allgather(runtime.names.unnamed("hvdlite", "memory"), own).wait()
    return MemoryReport(tuple(dict(zip(PARTS, row, strict=True)) for row in rows.tolist()), note)
