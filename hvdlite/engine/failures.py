"""The exception that a rank raises when the job fails."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.core.errors import (
    DeadlockError,
    HorovodInternalError,
    PeerFailedError,
    PeerLeftError,
    PeerLostError,
    StallError,
)
from hvdlite.negotiation.messages import FailureNotice


def failure_notice(error: Exception, rank: int) -> FailureNotice:
    """Return what `rank` reports about an error on it. It may have suffered from a rank that nobody can name."""
    if isinstance(error, PeerLostError) and error.rank == -1:
        return FailureNotice(-1, "lost", str(error))
    return FailureNotice(rank, type(error).__name__, str(error))


def failure_error(notice: FailureNotice, rank: int, names: Sequence[str] = ()) -> HorovodInternalError:
    """Return the exception that `rank` raises for a failure of the job.

    Args:
        names: of the ranks, in the text; by default their numbers.
    """
    origin = names[notice.origin] if names and notice.origin >= 0 else str(notice.origin)
    if notice.kind == StallError.__name__:
        return StallError(f"{notice.message}\n{notice.traceback}", notice.origin, notice.blamed)
    if notice.kind == DeadlockError.__name__:
        return DeadlockError(notice.message, notice.origin)
    if notice.origin == rank:
        return PeerFailedError(f"this rank ({origin}) failed with {notice.kind}: {notice.message}", rank)
    if notice.kind == PeerLeftError.__name__:
        return PeerLeftError(f"rank {origin} left the job while others still needed it: {notice.message}",
                             notice.origin)
    if notice.origin == -1:
        return PeerLostError(notice.message, notice.origin)
    if notice.kind == "lost":
        return PeerLostError(f"rank {origin} was lost: {notice.message}", notice.origin, notice.blamed)
    cause = f"\n\nrank {origin}'s traceback:\n{notice.traceback.rstrip()}" if notice.traceback else ""
    return PeerFailedError(f"rank {origin} failed with {notice.kind}: {notice.message}{cause}", notice.origin)
