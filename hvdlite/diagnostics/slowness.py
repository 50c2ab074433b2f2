"""Why training is slow: which rank the others wait for, and what that rank does meanwhile, from the ranks' ledgers.

In a step of data-parallel training all ranks wait for the slowest one, so the rank that waits least is the slow one. What it
uses more time for than the others is the likely cause. All of this is arithmetic on shares of time; see `core.ledger`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Final

from hvdlite.core.ledger import Ledger

LEAST_STEPS: Final = 5
"""Steps that a ledger must have."""
LEAST_EXCESS: Final = 0.1
"""The share of its time that a rank must use more than the median of the others, to be called slow."""
LEAST_COMMUNICATION: Final = 0.5
"""The share of its time that every rank must wait, for communication to be called slow."""
LEAST_ABSENT: Final = 0.5
"""Gradients that a rank, but not every rank, must lack in a step, for that to be called a cause of waiting."""

CAUSES: Final = {
    "input": "it waits longer for its input: more or faster loader processes, or a faster disk, would help",
    "cpu": "other processes or threads use its core: look for them with top, or give it more cores",
    "collection": "Python's garbage collection takes longer there: call gc.freeze() after the set-up, or collect less often",
    "waiting": "it waits for something else than a collective: a disk, a lock, another process, or a GPU",
    "computing": "it computes longer: more or longer samples, a slower core, or work that only this rank does",
    "communication": "no rank is late: the exchange itself takes this long (the link, the memory, or too few cores)",
    "absent": "gradients are missing there, so buckets wait for the end of its backward pass: are parameters frozen, or "
              "unused, on this rank only?",
}


@dataclasses.dataclass(frozen=True)
class Slowness:
    """Why a job is slow.

    Attributes:
        rank: the slow one; -1 when it is not one rank.
        cause: a key of `CAUSES`.
        share: of the time of a step, which goes away with the cause, about; 0..1.
        excess: of the slow rank, by cause: the share of time that it uses more than the others; of "absent", the gradients.
    """

    rank: int
    cause: str
    share: float
    excess: Mapping[str, float]

    def __str__(self) -> str:
        who = "all ranks wait for each other" if self.rank < 0 else f"rank {self.rank} is late"
        return f"slow: {who}; {self.share:.0%} of each step. The likely cause: {CAUSES[self.cause]}"

    def as_dict(self) -> dict[str, object]:
        """Return it for programs."""
        return {"rank": self.rank, "cause": self.cause, "share": round(self.share, 4), "text": str(self),
                "excess": {name: round(value, 4) for name, value in self.excess.items()}}


def diagnose(ledgers: Mapping[int, Ledger]) -> Slowness | None:
    """Return why a job is slow; None if nothing stands out.

    Args:
        ledgers: of at least two ranks, over about the same time.
    """
    used = {rank: ledger for rank, ledger in ledgers.items() if ledger.steps >= LEAST_STEPS and ledger.seconds > 0}
    if len(used) < 2:
        return None
    own = {rank: 1 - ledger.blocked / ledger.seconds for rank, ledger in used.items()}
    slow = max(own, key=lambda rank: own[rank])
    others = [rank for rank in used if rank != slow]
    excess = own[slow] - statistics.median(own[rank] for rank in others)
    if excess >= LEAST_EXCESS:
        crowd = statistics.median(used[rank].queued / max(used[rank].cpu, 1e-9) for rank in others)
        shares = {rank: _shares(ledger, crowd) for rank, ledger in used.items()}
        more = {cause: share - statistics.median(shares[rank][cause] for rank in others)
                for cause, share in shares[slow].items()}
        return Slowness(slow, max(more, key=lambda cause: more[cause]), excess, more)
    waits = min(ledger.blocked / ledger.seconds for ledger in used.values())
    absent = {rank: ledger.absent / ledger.steps for rank, ledger in used.items()}
    most = max(absent, key=lambda rank: absent[rank])
    if waits >= LEAST_EXCESS and absent[most] >= LEAST_ABSENT > min(absent.values()):
        return Slowness(most, "absent", waits, {"absent": absent[most] - min(absent.values())})
    return Slowness(-1, "communication", waits, {}) if waits >= LEAST_COMMUNICATION else None


def _shares(ledger: Ledger, crowd: float) -> dict[str, float]:
    """Return the share of time by cause, without waits for collectives; together about the rest.

    Args:
        crowd: seconds of waiting for a core for each second of running, of the other ranks: who runs longer waits longer.
    """
    off = ledger.seconds - ledger.cpu - ledger.queued - ledger.blocked - max(0.0, ledger.input - ledger.input_cpu)
    crowded = min(ledger.queued, crowd * ledger.cpu)
    computing = ledger.cpu - ledger.input_cpu - ledger.collecting + crowded
    seconds = {"input": ledger.input, "cpu": ledger.queued - crowded, "collection": ledger.collecting,
               "waiting": max(0.0, off), "computing": max(0.0, computing)}
    return {cause: value / ledger.seconds for cause, value in seconds.items()}
