"""Mailboxes at the coordinator: which blocking collectives go through shared memory, and how that ends. Pure.

A thread that blocks in a collective needs no coordinator if all ranks do the same again and again. After some such
calls the coordinator opens a *mailbox* for them: each rank writes the tensor and its description into it, wakes the others,
and makes its result of what all have written. See `handoff/mailbox.py` for a rank's side.

Rules (docs/protocol.md#mailboxes)
- A mailbox opens with the answer to a call of its stem. So no rank makes the next call of that name before that arrives.
- A round of a mailbox is complete when every member has written the same description (name, kind, dtype, shape but for rows
  that may differ, operation, factors, root). What a rank has written cannot be taken back.
- A mailbox ends in two decisions. After the first, no rank writes to it, and each one confirms that. After the second, all
  ranks see the same memory: a call in a round that is not complete becomes an ordinary request.
- It ends when a rank waits long in it or finds another description, and before a rank joins or leaves, before its process
  set is removed, while there is a timeline, and when another stem needs its area and there are no more. The coordinator
  needs no other reason: everything else that can happen to the tensor happens to the requests.
- An area is used again when all ranks have applied the decision that closed its mailbox: they have applied a later one, too,
  because a rank may send reports in the middle of a decision.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from hvdlite.core.device import CPU
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Bucket, Layout, Mailbox, MailboxFrozen, MailboxStale, Request
from hvdlite.negotiation.stalls import Stall

OPENS_AFTER: Final = 2
"""Calls of a stem after which a mailbox opens."""
MOST_CALLS: Final = 1024
"""The same after mailboxes of the stem that ended soon, or for another stem: doubled each time, up to this."""
SOON: Final = 16
"""Rounds below which a mailbox has ended soon."""
CLASSES: Final = ((31 << 10, 64), (512 << 10, 32), (4 << 20, 4))
"""The sizes of areas: bytes of the largest tensor (at most the largest that is allowed), and how many a job has. All areas
together take 68 MiB of each rank."""
TRAFFIC: Final = 1 << 20
"""Bytes of all ranks' values in one call, with more than two ranks: each reads them all, where a plane divides the work."""
STEMS: Final = 1024
"""Stems whose calls are counted; of more, counting begins anew."""
BLOCKING_KINDS: Final = frozenset({Collective.ALLREDUCE, Collective.REDUCESCATTER, Collective.BROADCAST,
                                   Collective.ALLGATHER, Collective.ALLTOALL, Collective.BARRIER})
OPERATIONS: Final = frozenset({ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT})

StemKey = tuple[int, str]
"""A process set, and the stem of a name."""


LONGEST_NUMBER: Final = 17
"""Digits, which fit into 64 bits with a 1 before them."""


def stem_and_number(name: str) -> tuple[str, int]:
    """Return a name without the digits at its end, because calls without a name are numbered; and a number that tells them.

    A name with too many digits is its own stem. Names with the same stem have different numbers, "x1" and "x01", too.
    """
    stem = name.rstrip("0123456789")
    digits = name[len(stem):]
    return (stem, int(f"1{digits}")) if len(digits) <= LONGEST_NUMBER else (name, 0)


def bucket_stem(bucket_id: int) -> str:
    """Return the stem of a learned bucket; no name has it, because it ends with a digit."""
    return f"bucket {bucket_id}"


def _class_of(nbytes: int) -> int:
    return next((size for size, _ in CLASSES if nbytes <= size), 0)


@dataclasses.dataclass
class _Open:
    """A mailbox that is not closed."""

    mailbox: Mailbox
    members: tuple[int, ...]
    last_round: int
    awaited: set[int] | None = None  # once it is frozen: the members that have not confirmed that they do not write to it
    since: float = 0.0  # when it was frozen
    waiting: dict[int, str] = dataclasses.field(default_factory=dict)  # tensors that ranks wait for, by rank
    warned: bool = False
    is_evicted: bool = False  # another stem needs its area
    label: str = ""  # of the gradient set, if it is a learned bucket's

    @property
    def rounds(self) -> int:
        """How many rounds it has had, once it has ended."""
        return self.last_round - self.mailbox.first_round + 1


@dataclasses.dataclass
class _Area:
    size: int  # members; 0 when it is not used any more
    capacity: int
    members: tuple[int, ...] = ()  # of its last mailbox
    next_round: int = 1
    closed_in: int | None = None  # the decision that closed its mailbox; None while it has one, or is not used again


class MailboxTable:
    """The mailboxes of a job.

    Args:
        limit: bytes of the largest tensor that goes through a mailbox; 0 turns mailboxes off.

    Attributes:
        opened, frozen, closed: for the next decision.
        applied: returns the last decision that all ranks have applied.
        is_suspended: whether none is opened now.
    """

    def __init__(self, limit: int) -> None:
        self.opened: list[Mailbox] = []
        self.frozen: list[int] = []
        self.closed: list[int] = []
        self.applied: Callable[[], int] = lambda: -1
        self.is_suspended = False
        self._limit = min(limit, CLASSES[-1][0])
        self._open: dict[int, _Open] = {}
        self._stems: dict[StemKey, _Open] = {}  # likewise
        self._calls: dict[StemKey, int] = {}  # as requests, since the last mailbox was opened
        self._needed: dict[StemKey, int] = {}  # calls, where it is not `OPENS_AFTER`
        self._areas: list[_Area] = []
        self._next_id = 1

    def __bool__(self) -> bool:
        """Return whether the next decision has news of mailboxes."""
        return bool(self.opened or self.frozen or self.closed)

    # --- learning ------------------------------------------------------------------------------------------------------

    def observe(self, request: Request, members: tuple[int, ...], nbytes: int, now: float, *, all_blocking: bool) -> None:
        """Count a request that all ranks have made, and that is answered by the next decision.

        Args:
            nbytes: what a rank brings at most.
            all_blocking: whether threads of all members block in it, and all members have data.
        """
        if not self._limit or request.label or request.collective not in BLOCKING_KINDS or len(members) < 2:
            return
        key = request.process_set_id, stem_and_number(request.name)[0]
        limit = self._limit if len(members) == 2 else min(self._limit, TRAFFIC // len(members))
        fits = (all_blocking and request.op in OPERATIONS and request.device == CPU and not request.group
                and nbytes <= limit)
        self._count(key, members, min(limit, _class_of(nbytes)), now, fits=fits)

    def observe_bucket(self, bucket: Bucket, now: float, *, all_blocking: bool) -> None:
        """Count a learned bucket that all ranks have filled, and that the next decision releases."""
        response = bucket.response
        members = response.contributors
        fits = self._limit > 0 and all_blocking and len(members) > 1 and response.op in OPERATIONS and response.device == CPU
        self._count((response.process_set_id, bucket_stem(bucket.bucket_id)), members, 0, now, fits=fits,
                    label=bucket.members[0].label)

    def _count(self, key: StemKey, members: tuple[int, ...], capacity: int, now: float, *, fits: bool,
               label: str = "") -> None:
        """Count a call of a stem; open a mailbox for it, or end the one that it did not go through."""
        if not fits or self.is_suspended:
            self._calls.pop(key, None)
            return
        if len(self._calls) >= STEMS and key not in self._calls:
            self._calls.clear()
            self._needed.clear()
        self._calls[key] = self._calls.get(key, 0) + 1
        found = self._stems.get(key)
        if found is not None:
            if self._calls[key] >= OPENS_AFTER:  # it has room for smaller tensors only
                self._freeze(found, now)
        elif self._calls[key] >= self._needed.get(key, OPENS_AFTER):
            self._open_for(key, members, capacity, now, label)

    def _open_for(self, key: StemKey, members: tuple[int, ...], capacity: int, now: float, label: str) -> None:
        number = self._free_area(members, capacity)
        if number is None:
            self._take_back(members, capacity, now)
            return
        area = self._areas[number]
        area.closed_in, area.members = None, members
        mailbox = Mailbox(mailbox_id=self._next_id, stem=key[1], process_set_id=key[0], area=number, capacity=capacity,
                          first_round=area.next_round)
        self._next_id += 1
        self._open[mailbox.mailbox_id] = self._stems[key] = _Open(
            mailbox, members, area.next_round - 1, label=label)
        self._calls.pop(key, None)
        self.opened.append(mailbox)

    def _free_area(self, members: tuple[int, ...], capacity: int) -> int | None:
        applied = self.applied()
        for number, area in enumerate(self._areas):
            if (area.closed_in is not None and area.closed_in < applied and area.size == len(members)
                    and area.capacity == capacity):
                return number
        least, size, most = next((least, size, most) for (least, _), (size, most) in itertools.pairwise(((0, 0), *CLASSES))
                                 if capacity <= size)
        if capacity and sum(least < area.capacity <= size for area in self._areas) >= most:  # buckets: as many as layouts
            return None
        self._areas.append(_Area(len(members), capacity))
        return len(self._areas) - 1

    def _take_back(self, members: tuple[int, ...], capacity: int, now: float) -> None:
        """End the mailbox that was opened first, unless an area is about to be free; a later call gets it."""
        mine = [number for number, area in enumerate(self._areas) if (area.size, area.capacity) == (len(members), capacity)]
        in_use = [found for found in self._open.values() if found.mailbox.area in mine]
        if in_use and len(in_use) == len(mine) and all(found.awaited is None for found in in_use):
            in_use[0].is_evicted = True
            self._freeze(in_use[0], now)

    # --- the end of a mailbox ------------------------------------------------------------------------------------------

    def stale(self, rank: int, stale: MailboxStale, now: float) -> None:
        """A rank cannot go on in a mailbox, which may be closed already."""
        found = self._open.get(stale.mailbox_id)
        if found is not None:
            found.waiting[rank] = stale.name
            self._freeze(found, now)

    def freeze_of(self, ranks: Iterable[int], now: float) -> None:
        """End the mailboxes that any of some ranks belongs to."""
        for found in [found for found in self._open.values() if not set(found.members).isdisjoint(ranks)]:
            self._freeze(found, now)

    def freeze_buckets(self, layout: Layout, now: float) -> None:
        """End the mailboxes of a layout's buckets."""
        for bucket in layout.buckets:
            found = self._stems.get((bucket.response.process_set_id, bucket_stem(bucket.bucket_id)))
            if found is not None:
                self._freeze(found, now)

    def freeze_in(self, process_set_id: int, now: float) -> None:
        """End the mailboxes of a process set."""
        for found in list(self._open.values()):
            if found.mailbox.process_set_id == process_set_id:
                self._freeze(found, now)

    def leave(self, rank: int, sequence: int, now: float) -> None:
        """A rank has left: it writes to no mailbox any more, and no area of its own is used again."""
        self.freeze_of([rank], now)
        for found in list(self._open.values()):
            if found.awaited is not None and rank in found.awaited:
                self._answered(found, rank, sequence)
        for area in self._areas:
            if rank in area.members:
                area.size = 0

    def member_frozen(self, rank: int, frozen: MailboxFrozen, sequence: int) -> tuple[str, int] | None:
        """A member does not write to a mailbox any more; if this ends a bucket's, return the gradient set and the rounds.

        Args:
            sequence: of the next decision.
        """
        found = self._open.get(frozen.mailbox_id)
        if found is None or found.awaited is None or rank not in found.awaited:
            return None
        found.last_round = max(found.last_round, frozen.round_id)
        self._answered(found, rank, sequence)
        return (found.label, found.rounds) if found.label and not found.awaited else None

    def _freeze(self, found: _Open, now: float) -> None:
        if found.awaited is None:
            found.awaited, found.since = set(found.members), now
            self.frozen.append(found.mailbox.mailbox_id)

    def _answered(self, found: _Open, rank: int, sequence: int) -> None:
        assert found.awaited is not None
        found.awaited.discard(rank)
        if found.awaited:
            return
        mailbox = found.mailbox
        del self._open[mailbox.mailbox_id]
        self.closed.append(mailbox.mailbox_id)
        area = self._areas[mailbox.area]
        area.next_round, area.closed_in = found.last_round + 1, sequence
        key = mailbox.process_set_id, mailbox.stem
        del self._stems[key]
        if found.is_evicted or found.rounds < SOON:
            self._needed[key] = min(2 * self._needed.get(key, OPENS_AFTER), MOST_CALLS)
        else:
            self._needed.pop(key, None)

    # --- what is pending -----------------------------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether ranks have yet to freeze a mailbox."""
        return any(found.awaited is not None for found in self._open.values())

    def stalls(self, now: float) -> list[Stall]:
        """Return the mailboxes that wait for ranks to freeze them."""
        return [_stall(found, now) for found in self._ending()]

    def new_stalls(self, now: float, after: float) -> list[Stall]:
        """Return those that have waited at least `after` seconds and were not returned before."""
        found = [each for each in self._ending() if now - each.since >= after and not each.warned]
        for each in found:
            each.warned = True
        return [_stall(each, now) for each in found]

    def _ending(self) -> Iterator[_Open]:
        return (found for found in self._open.values() if found.awaited is not None)


def _stall(found: _Open, now: float) -> Stall:
    awaited = found.awaited or set()
    name = next(iter(found.waiting.values()), found.mailbox.stem)
    return Stall(name, now - found.since, tuple(sorted(found.waiting)), tuple(sorted(awaited - found.waiting.keys())))
