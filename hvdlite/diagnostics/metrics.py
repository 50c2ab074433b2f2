"""Metrics that a script records after its evaluations; `hvdrun --sweep ... --until` reads them when a rank has ended."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdlite.core.launch_contract import METRICS_FILE


class Evaluation(NamedTuple):
    """What a script has recorded after an evaluation."""

    seconds: float  # since `hvd.init()`
    epoch: float  # epochs trained by then
    metrics: dict[str, float]


class MetricsFile:
    """A rank's metrics, in a file in the job's directory: one evaluation a line, as JSON."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._begun = 0.0

    def publish(self, job_directory: str, rank: int) -> None:
        """Write metrics there from now on, and count seconds from now."""
        self._path, self._begun = Path(job_directory) / f"{METRICS_FILE}.{rank}", time.monotonic()

    def record(self, metrics: Mapping[str, Any], epoch: float) -> None:
        """Write an evaluation down, unless no launcher reads it or there is no room for it: no job depends on it.

        Raises:
            ValueError: for a metric that is not a number, or an epoch below 0.
        """
        numbers = {str(name): _number(f"metric {name!r}", value) for name, value in metrics.items()}
        epoch = _number("the epoch", epoch)
        if not epoch >= 0:
            raise ValueError(f"the epoch is the number of epochs trained so far, which cannot be {epoch:g}")
        if self._path is not None:
            line = json.dumps(Evaluation(time.monotonic() - self._begun, epoch, numbers))
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def read(job_directory: str, rank: int) -> list[Evaluation]:
    """Return a rank's evaluations in the order in which it recorded them."""
    found = []
    with contextlib.suppress(OSError, ValueError):  # the last line is cut off where the disk is full
        for line in (Path(job_directory) / f"{METRICS_FILE}.{rank}").read_text(encoding="utf-8").splitlines():
            found.append(Evaluation(*json.loads(line)))
    return found


def _number(what: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} is not a number: {value!r}") from None
