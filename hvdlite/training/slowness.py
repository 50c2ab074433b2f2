"""Why training is slow, told to the script: see `diagnostics.slowness`."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hvdlite.api import runtime as current_runtime
from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.progress import WINDOW_SECONDS
from hvdlite.diagnostics.slowness import Slowness, diagnose

PREFIX = "hvdlite"


def ledgers(window: float = WINDOW_SECONDS) -> dict[int, Ledger]:
    """Return what each rank has used its time for in the last `window` seconds; all ranks call this."""
    runtime = current_runtime()
    own = np.array([msgspec.structs.astuple(runtime.progress.ledger(window))], np.float64)
    rows = runtime.allgather(runtime.unnamed("hvdlite", "ledger"), own).wait()
    return {rank: msgspec.convert(row, Ledger, strict=False) for rank, row in enumerate(rows.tolist())}


def slowness(window: float = WINDOW_SECONDS) -> Slowness | None:
    """Return which rank was slow in the last `window` seconds, and the likely cause; None if nothing stands out.

    All ranks call this, and get the same: a small allgather. See docs/when-it-hangs.md#slow-ranks for the causes.

    Raises:
        HorovodInternalError: like every collective.
    """
    return diagnose(ledgers(window))


def log_slowness(step: int, writer: Any = None) -> Slowness | None:
    """Like `slowness`, and let rank 0 write it down.

    Written are, with the prefix `hvdlite/`: `slow_rank` (-1: none), `slow_share` (of each step, 0..1) and `waits/rank_N`
    (the share of its time in which rank N waits for collectives).

    Args:
        writer: None, or TensorBoard's `SummaryWriter`, the module `mlflow`, the module `wandb` or a run of it; anything with
            `add_scalar(name, value, step)`, `log_metrics(dict, step=)` or `log(dict, step=)`. Needed on rank 0 only.

    Raises:
        TypeError: on rank 0, for a writer with none of these.
    """
    found = ledgers()
    slow = diagnose(found)
    if current_runtime().world.rank == 0:
        values = {"slow_rank": float(-1 if slow is None else slow.rank), "slow_share": 0.0 if slow is None else slow.share}
        values |= {f"waits/rank_{rank}": each.blocked / each.seconds for rank, each in found.items() if each.seconds > 0}
        write({f"{PREFIX}/{name}": value for name, value in values.items()}, step, writer)
    return slow


def write(values: dict[str, float], step: int, writer: Any) -> None:
    """Write numbers as the writer's library wants them; see `log_slowness`."""
    if writer is None:
        return
    if hasattr(writer, "add_scalar"):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(values, step=step)
    elif hasattr(writer, "log"):
        writer.log(values, step=step)
    else:
        raise TypeError(f"writer must have add_scalar (TensorBoard), log_metrics (MLflow) or log (W&B); "
                        f"{type(writer).__name__} has none of them")
