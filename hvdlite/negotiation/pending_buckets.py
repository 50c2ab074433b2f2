"""Learned buckets that some ranks have reported, and others have not. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvdlite.core.errors import ProtocolError
from hvdlite.negotiation.fusion import ranks_in_step
from hvdlite.negotiation.gathering import Ranks
from hvdlite.negotiation.layouts import requests_of
from hvdlite.negotiation.messages import Bucket, BucketReady, BucketRelease, Layout, Request


def unused_members(reports: Sequence[BucketReady]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of members that are unused in all of the reports, and of those that are in some, but not in all."""
    if not any(ready.unused or ready.unused_somewhere for ready in reports):
        return (), ()
    everywhere = set.intersection(*(set(ready.unused) for ready in reports))
    anywhere = set().union(*(ready.unused for ready in reports), *(ready.unused_somewhere for ready in reports))
    return tuple(sorted(everywhere)), tuple(sorted(anywhere - everywhere))


@dataclasses.dataclass
class PendingBucket:
    """One bucket that some ranks have reported."""

    since: float  # when the first rank reported it; the caller's clock, seconds
    bucket: Bucket
    step: int  # as in the reports
    reported: dict[Ranks, BucketReady] = dataclasses.field(default_factory=dict)  # invariant: never all ranks
    count: int = 0  # of those ranks
    in_step: bool = False  # some rank reported it from within its optimizer's step
    warned: bool = False

    @property
    def ranks(self) -> list[int]:
        """The ranks that have reported it."""
        return [rank for ranks in self.reported for rank in ranks]

    def release(self) -> BucketRelease:
        """Return the release of the bucket, once all ranks have reported it."""
        in_step: tuple[int, ...] = ()
        if self.in_step:
            in_step = ranks_in_step({rank: ready.in_step for ranks, ready in self.reported.items() for rank in ranks})
        everywhere, somewhere = unused_members(list(self.reported.values()))
        return BucketRelease(bucket_id=self.bucket.bucket_id, globally_unused=everywhere, partly_unused=somewhere,
                             ranks_in_step=in_step)


class PendingBuckets(dict[int, PendingBucket]):
    """The incomplete buckets, by id, oldest first."""

    def add(self, ranks: Ranks, ready: BucketReady, bucket: Bucket, now: float) -> BucketRelease | None:
        """Record that some ranks report a bucket; return its release when these were the last.

        Raises:
            ProtocolError: when they report it a second time before its release.
        """
        pending = self.get(ready.bucket_id)
        if pending is None:
            pending = self[ready.bucket_id] = PendingBucket(now, bucket, ready.step)
        if ranks in pending.reported:
            raise ProtocolError(f"reported bucket {ready.bucket_id} of '{bucket.members[0].label}' twice before it was "
                                "answered")
        pending.reported[ranks] = ready
        pending.count += len(ranks)
        pending.in_step = pending.in_step or ready.in_step
        if pending.count < len(bucket.response.contributors):
            return None
        del self[ready.bucket_id]
        return pending.release()

    def withdraw(self, layout: Layout) -> list[tuple[Ranks, Request]]:
        """Remove a layout's buckets; return the requests that their reports stand for, as (ranks, request)."""
        withdrawn: list[tuple[Ranks, Request]] = []
        for bucket in layout.buckets:
            pending = self.pop(bucket.bucket_id, None)
            for ranks, ready in pending.reported.items() if pending else ():
                withdrawn.extend((ranks, request) for request in requests_of(bucket, ready))
        return withdrawn

    def check_invariants(self) -> None:
        """Fail when an entry is empty or complete."""
        for pending in self.values():
            assert 0 < pending.count == len(pending.ranks) < len(pending.bucket.response.contributors), pending
