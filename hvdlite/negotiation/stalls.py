"""Tensors and buckets that some ranks have reported and others have not, as the stall inspector sees them. Pure."""

from __future__ import annotations

import dataclasses

from hvdlite.negotiation.messages import Key
from hvdlite.negotiation.pending_buckets import PendingBucket
from hvdlite.negotiation.readiness import ReadinessTable


@dataclasses.dataclass(frozen=True)
class Stall:
    """A tensor, or a bucket, that waits for some ranks."""

    name: str
    waited: float  # seconds
    enqueued: tuple[int, ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return (f"'{self.name}' has waited {self.waited:.0f} s: enqueued by ranks {list(self.enqueued)}, "
                f"not yet by ranks {list(self.missing)}")


def tensor_stall(table: ReadinessTable, key: Key, now: float) -> Stall:
    """Describe an incomplete tensor."""
    tensor = table.pending[key]
    return Stall(key[1], now - tensor.since, tuple(sorted(tensor.requests)), tuple(table.missing(key)))


def bucket_stall(pending: PendingBucket, now: float) -> Stall:
    """Describe an incomplete bucket; it is called after its first member."""
    first, *more = pending.bucket.members
    name = first.name + (f"' and {len(more)} more of '{first.label}" if more else "")
    present = frozenset(pending.ranks)
    return Stall(name, now - pending.since, tuple(sorted(present)),
                 tuple(rank for rank in pending.bucket.response.contributors if rank not in present))
