"""Why training is slow, reported to the script: see `diagnostics.slowness`."""

from __future__ import annotations

import sys
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
    own = np.frombuffer(msgspec.json.encode(runtime.progress.ledger(window)) + b"\n", np.uint8)
    lines = bytes(runtime.allgather(runtime.names.unnamed("hvdlite", "ledger"), own).wait()).splitlines()
    return {rank: msgspec.json.decode(line, type=Ledger) for rank, line in enumerate(lines)}


def slowness(window: float = WINDOW_SECONDS) -> Slowness | None:
    """Return which rank was slow in the last `window` seconds, and the likely cause; None if nothing stands out.

    All ranks call this, and get the same: a small allgather. See docs/when-it-hangs.md#slow-ranks for the causes.

    Args:
        window: how far back to look, in seconds.

    Raises:
        HorovodInternalError: like every collective.
    """
    return diagnose(ledgers(window))


def log_slowness(step: int, writer: Any = None) -> Slowness | None:
    """Like `slowness`, and let rank 0 write it down.

    Written are, with the prefix `hvdlite/`: `slow_rank` (-1: none), `slow_share` (of each step, 0..1) and `waits/rank_N`
    (the share of its time in which rank N waits for collectives).

    Args:
        step: the number under which the values are written.
        writer: None, or TensorBoard's `SummaryWriter`, a writer of `tf.summary`, the module `mlflow`, or the module `wandb`
            or a run of it; anything with `add_scalar(name, value, step)`, `log_metrics(dict, step=)` or
            `log(dict, step=)`. Needed on rank 0 only. W&B drops values of a step before its present one: then they
            are logged with the present one, and `hvdlite/step` is the step that was given.

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
        run = getattr(writer, "run", None) or writer  # of the module wandb
        if step < getattr(run, "step", step):
            writer.log({**values, f"{PREFIX}/step": step}, commit=False)
        else:
            writer.log(values, step=step)
    elif hasattr(writer, "as_default"):
        scalar = sys.modules["tensorflow"].summary.scalar  # it has made the writer
        with writer.as_default(step):
            for name, value in values.items():
                scalar(name, value)
    else:
        raise TypeError(f"writer must have add_scalar (TensorBoard), log_metrics (MLflow), log (W&B) or as_default "
                        f"(tf.summary); {type(writer).__name__} has none of them")
