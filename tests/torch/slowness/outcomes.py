"""What trials of `hvd.slowness()` have shown, and what disturbed them."""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd
from hvdlite.diagnostics.slowness import LEAST_EXCESS, Slowness

NONE = "none"
"""The cause of a control: nothing is done."""


@dataclass(frozen=True)
class Outcome:
    """One trial.

    Attributes:
        cause: what was done; `NONE` in a control.
        rank: to which rank.
        share: of a step's time that this was to take.
        slowed: the share that it took, by the steps' times without it.
        others: cores that other processes of the machine, or its host, have used meanwhile.
        found: what `slowness` said, as a dictionary.
    """

    cause: str
    rank: int
    share: float
    slowed: float
    others: float
    found: dict[str, Any] | None

    @property
    def has_rank(self) -> bool:
        """Whether the right rank was named; in a control none."""
        return self.found is None if self.cause == NONE else self.found is not None and self.found["rank"] == self.rank

    @property
    def has_cause(self) -> bool:
        """Whether the right cause was, too."""
        return self.has_rank and (self.found is None or self.found["cause"] == self.cause)

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes have used as much of a core as would be called slow."""
        return self.others >= LEAST_EXCESS

    def __str__(self) -> str:
        done = "control" if self.cause == NONE else f"{self.cause} on rank {self.rank} ({self.share:.0%})"
        told = "" if self.found is None else f" ({self.found['share']:.0%})"
        right = f"right{told}" if self.has_cause else f"{'right rank' if self.has_rank else 'WRONG'}: {self.found}"
        return f"{done}; steps {self.slowed:+.0%}; others used {self.others:.2f} cores: {right}"


class OthersTime:
    """Counts the CPU time of all processes but this job's ranks; every rank makes one at the same time."""

    def __init__(self) -> None:
        self._begun, self._all, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def cores(self) -> float:
        """Return the cores that others have used on average; all ranks call this, and get the same."""
        own, seconds = _own_seconds() - self._own, time.monotonic() - self._begun
        ours = hvd.allreduce(torch.tensor(own / seconds), op=hvd.Sum, name="ours")
        rest = torch.tensor((_busy_seconds() - self._all) / seconds) - ours
        return float(hvd.broadcast(rest, 0, name="others").clamp(min=0))


def _busy_seconds() -> float:
    """Return the seconds in which processes ran, or the hypervisor had a core; see proc_stat(5). Interrupts are left out."""
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the CPU time of this process, and of those that it has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime


def record(path: Path, outcome: Outcome) -> None:
    """Print an outcome, and add it to a file."""
    print(f"{time.strftime('%X')} load {os.getloadavg()[0]:.1f}: {outcome}", flush=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def recorded(path: Path) -> list[Outcome]:
    """Return a file's outcomes."""
    return [Outcome(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def as_found(slowness: Slowness | None) -> dict[str, Any] | None:
    """Return what `slowness` said as `Outcome.found`."""
    return None if slowness is None else slowness.as_dict()


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the counts of all outcomes, and of those that nothing disturbed."""
    lines = [_counts("all", outcomes), _counts("undisturbed", [each for each in outcomes if not each.is_disturbed])]
    for cause in sorted({each.cause for each in outcomes} - {NONE}):
        lines.append(_counts(f"  {cause}", [each for each in outcomes if each.cause == cause]))
    return "\n".join(lines)


def _counts(name: str, outcomes: Sequence[Outcome]) -> str:
    def count(of: Callable[[Outcome], bool], *, controls: bool) -> int:
        return sum(of(each) for each in outcomes if (each.cause == NONE) is controls)
    kinds = Counter(each.cause == NONE for each in outcomes)
    text = (f"{name}: {kinds[False]} trials: right rank {count(lambda each: each.has_rank, controls=False)}, "
            f"right cause {count(lambda each: each.has_cause, controls=False)}")
    if kinds[True]:
        text += f"; {kinds[True]} controls: {count(lambda each: not each.has_rank, controls=True)} false alarms"
    return text
