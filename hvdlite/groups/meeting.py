"""How the ranks of a group meet on a runtime, and the memory that those of a host share.

They meet by one trip through rank 0 of the runtime, over connections that are authenticated.

Each rank announces to the group's first rank which ranks it expects, and the first rank of a host the range of memory that
it has taken for the group. The first rank of the group answers all of them. Whoever waits is notified at once when the job
fails, or a rank of the group has left it.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError, LaunchError, PeerLeftError
from hvdlite.core.texts import shortened, text_of
from hvdlite.groups.members import GroupMembers
from hvdlite.memory.area import Area, area_bytes
from hvdlite.memory.rings import pair_bytes
from hvdlite.memory.shared import PAGE, Range, Segment, counter_bytes, segment_bytes
from hvdlite.runtime.runtime import Runtime

_log = logging.getLogger("hvdlite")

ANSWER_SECONDS: Final = 1.0
"""How long after its timeout a rank waits for the first one to report who is missing."""
LONGEST_PROBLEM: Final = 1000


class _Arrival(msgspec.Struct, array_like=True, frozen=True):
    """What a rank announces to the first one."""

    number: int  # random: the answer has it, too, so that old answers are not taken for new ones
    ranks: tuple[int, ...] = ()  # of the group; none: this rank has given up
    place: tuple[int, int] | None = None  # on the first rank of a host: its memory's place in the file, and the length
    problem: str = ""  # why there can be no group


class _MeetingResult(msgspec.Struct, array_like=True, frozen=True):
    """What the first rank answers to all that have arrived."""

    numbers: dict[int, int]  # by rank of the runtime
    identity: str = ""
    places: tuple[tuple[int, int], ...] = ()  # by host
    problem: str = ""
    left: int = -1  # the rank that has left the job, if that is why there is no group


class MeetingPlace(msgspec.Struct, frozen=True):
    """Where a group lives.

    Attributes:
        identity: the same on all its ranks, and of no other group.
        memory: of this rank's host.
    """

    identity: str
    memory: Range


class GroupMeeting:
    """One rank's part in a meeting.

    Args:
        nbytes: of memory that this rank's host needs.
        patience: seconds after which it is logged which ranks have not come.
    """

    def __init__(self, runtime: Runtime, members: GroupMembers, nbytes: int, patience: float = math.inf) -> None:
        self._runtime = runtime
        self._channel = runtime.connections.oob
        self._members = members
        self._nbytes = nbytes
        self._name = members.name
        self._rank = members.rank
        self._ranks = members.of_runtime
        self._first = self._ranks.index(min(self._ranks))  # the same for all, in whatever order they have the members
        self._label = f"meet.{min(self._ranks)}.{self._name}"
        self._arrivals: dict[int, _Arrival] = {}  # by rank of the runtime
        self._others: list[tuple[int, bytes]] = []  # what ranks have announced that are no members
        self._answer: _MeetingResult | None = None
        self._start = time.monotonic()
        self._patience = patience

    def meet(self, deadline: float) -> MeetingPlace:
        """Meet the others; all ranks of the group call this.

        Args:
            deadline: in `time.monotonic()`.

        Raises:
            LaunchError: if they do not agree, or do not come in time.
            PeerLeftError: if one has left the job.
            HorovodInternalError: if the job fails.
            MemoryError: if there is no memory, on the rank that needs it.
        """
        heaps, taken, problem = self._runtime.connections.heaps, None, None
        number = secrets.randbits(63)
        try:
            if self._rank == self._members.local[0]:
                taken = heaps[self._runtime.world.rank].take(self._nbytes)
        except MemoryError as error:
            problem = error
        own = _Arrival(number, self._ranks, (taken.start, self._nbytes) if taken else None,
                      text_of(problem) if problem else "")
        answer = None
        try:
            answer = self._met(own, deadline)
        finally:
            self._channel.give_back(self._label, self._others)
            if self._rank != self._first and (answer is None or answer.problem):
                self._announce((self._ranks[self._first],), _Arrival(number))
            if taken is not None and self._answer is not None and self._answer.problem:  # else others may use it
                heaps[self._runtime.world.rank].lend([taken], lambda: True)
        if problem is not None:
            raise problem
        if answer.left >= 0:
            raise PeerLeftError(answer.problem, answer.left)
        if answer.problem:
            raise LaunchError(answer.problem)
        if taken is None:
            start, nbytes = answer.places[self._members.hosts.ranks_by_host.index(self._members.local)]
            taken = heaps[self._ranks[self._members.local[0]]].mapped(start, nbytes)
        return MeetingPlace(answer.identity, taken)

    def _met(self, own: _Arrival, deadline: float) -> _MeetingResult:
        if self._rank != self._first:
            self._announce((self._ranks[self._first],), own)
            return self._answered(own.number, deadline)
        self._arrivals[self._ranks[self._rank]] = own
        try:
            answer = self._collected(deadline)
        except HorovodInternalError:  # the job has failed: all learn it from their own runtime
            raise
        except BaseException as error:
            problem = f"{self._name}: rank {self._members.names[self._rank]} has given up: {text_of(error)}"
            self._send_result(_MeetingResult({}, problem=shortened(problem, LONGEST_PROBLEM)))
            raise
        self._answer = answer
        self._send_result(answer)
        return answer

    # --- the first rank ---------------------------------------------------------------------------------------------------

    def _collected(self, deadline: float) -> _MeetingResult:
        """Wait for the others; return the answer to all."""
        if not self._wait(self._all_have_come, deadline):
            return _MeetingResult({}, problem=self._in_vain(self._missing()))
        gone = self._departed()
        if gone:
            return _MeetingResult({}, problem=self._departure(gone), left=gone[0])
        for index, rank in enumerate(self._ranks):
            member = self._arrivals[rank]
            if member.problem:
                return _MeetingResult({}, problem=f"{self._name}: {self._members.named([index])}: {member.problem}")
            if member.ranks != self._ranks:
                return _MeetingResult({}, problem=(
                    f"{self._name}: the ranks do not agree on its members: {list(self._ranks)} on "
                    f"{self._members.named([self._rank])}, {list(member.ranks)} on {self._members.named([index])}"))
        places = [self._arrivals[self._ranks[group[0]]].place for group in self._members.hosts.ranks_by_host]
        return _MeetingResult({}, secrets.token_hex(8), tuple(place for place in places if place is not None))

    def _all_have_come(self) -> bool:
        for rank, text in self._channel.take(self._label):
            if rank not in self._ranks:  # it is early: this rank makes that group later
                self._others.append((rank, text))
                continue
            member = msgspec.msgpack.decode(text, type=_Arrival)
            if member.ranks:
                self._arrivals[rank] = member
            elif rank in self._arrivals and self._arrivals[rank].number == member.number:
                del self._arrivals[rank]
        return not self._missing() or bool(self._departed())

    def _missing(self) -> list[int]:
        return [index for index, rank in enumerate(self._ranks) if rank not in self._arrivals]

    def _send_result(self, answer: _MeetingResult) -> None:
        numbers = {rank: member.number for rank, member in self._arrivals.items() if rank != self._ranks[self._rank]}
        if numbers:
            self._announce(list(numbers), msgspec.structs.replace(answer, numbers=numbers))

    # --- the others -------------------------------------------------------------------------------------------------------

    def _answered(self, number: int, deadline: float) -> _MeetingResult:
        """Wait for the first rank's answer."""
        def has_come() -> bool:
            for _, text in self._channel.take(self._label):
                answer = msgspec.msgpack.decode(text, type=_MeetingResult)
                if answer.numbers.get(self._ranks[self._rank]) == number:
                    self._answer = answer
            return self._answer is not None or bool(self._departed())

        if not self._wait(has_come, deadline) and not self._wait(has_come, time.monotonic() + ANSWER_SECONDS):
            return _MeetingResult({}, problem=self._in_vain([self._first]))
        gone = self._departed()
        return self._answer or _MeetingResult({}, problem=self._departure(gone), left=gone[0])

    # ------------------------------------------------------------------------------------------------------------------

    def _wait(self, is_over: Callable[[], bool], deadline: float) -> bool:
        """Wait, and log once who has not come when that takes long."""
        log_at = self._start + self._patience
        if log_at < deadline and not self._channel.wait(is_over, log_at):
            self._patience = math.inf
            is_first = self._rank == self._first
            if is_first or self._rank == (self._first == 0):  # of those that wait for the first one, one is enough
                _log.warning("%s: %s has waited %.0f s for %s to make the group", self._name,
                             self._members.named([self._rank]), time.monotonic() - self._start,
                             self._members.named(self._missing() if is_first else [self._first]))
        return self._channel.wait(is_over, deadline)

    def _departed(self) -> list[int]:
        gone = self._runtime.departed
        return [index for index, rank in enumerate(self._ranks) if rank in gone]

    def _departure(self, gone: Sequence[int]) -> str:
        return (f"{self._name}: {self._members.named(gone)} left the job (its process ended, or destroyed all its groups) "
                "and cannot make the group")

    def _in_vain(self, missing: Sequence[int]) -> str:
        return (f"{self._name}: {self._members.named([self._rank])} has waited in vain for "
                f"{self._members.named(missing)}; all {len(self._ranks)} ranks must make the group, with the same backend: "
                f"timeout after {time.monotonic() - self._start:.1f} s")

    def _announce(self, to: Sequence[int], text: _Arrival | _MeetingResult) -> None:
        self._channel.announce(self._label, to, msgspec.msgpack.encode(text))


class GroupMemory:
    """Implements `planes.staging.HostMemory` for the plane of a group, which needs one segment.

    Args:
        ranks: number of ranks of the group on this host.
        slot: bytes of a staging slot.

    Attributes:
        nbytes: of the range that it needs.
        pairs: the lines of the rings.
    """

    def __init__(self, ranks: int, slot: int) -> None:
        self._ranks = ranks
        self._pairs_at = _padded(area_bytes(ranks))
        self._segment_at = self._pairs_at + _padded(pair_bytes(ranks))
        self.nbytes = self._segment_at + segment_bytes(ranks, slot)
        self.pairs = memoryview(b"")

    def area(self, taken: Range, index: int) -> Area:
        """Use a range; return the area of this rank, which has this index on its host.

        Raises:
            MemoryError: if the system has no memory left.
        """
        taken.allocate(0, self._segment_at + counter_bytes(self._ranks))
        self._range, self._index = taken, index
        self.pairs = taken.bytes[self._pairs_at:self._pairs_at + pair_bytes(self._ranks)].data
        return Area(taken.bytes[:area_bytes(self._ranks)], index, self._ranks)

    def segment(self, ranks: Sequence[int], slot: int) -> Segment:
        part = self._range.part(self._segment_at, segment_bytes(self._ranks, slot))
        return Segment(part, self._index, self._ranks, slot)

    def window(self, nbytes: int, ranks: Sequence[int]) -> list[Array]:
        raise MemoryError("a group has no fusion buffers")

    def close(self) -> None:
        pass


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
