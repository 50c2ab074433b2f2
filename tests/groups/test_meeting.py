"""How ranks meet to make a group: real channels and rank 0's store between threads, without a runtime."""

from __future__ import annotations

import logging
import os
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

import pytest

from hvdlite.core.errors import HorovodInternalError, LaunchError, PeerLeftError
from hvdlite.core.kernel_files import anonymous_file
from hvdlite.core.world import Hosts
from hvdlite.engine.oob import OobChannel
from hvdlite.groups import meeting
from hvdlite.groups.meeting import GroupMeeting, MeetingPlace
from hvdlite.groups.members import GroupMembers
from hvdlite.memory.shared import SharedMemory
from hvdlite.negotiation.oob_store import OobStore
from tests.worlds import HANGS_SECONDS


class Job:
    """Ranks whose channels pass everything on at once, as rank 0 would."""

    def __init__(self, size: int) -> None:
        self.store, self.lock = OobStore(0), threading.RLock()
        self.channels = [OobChannel(rank) for rank in range(size)]
        self.departed: set[int] = set()
        file = anonymous_file()
        self.runtimes: list[Any] = []
        for rank, channel in enumerate(self.channels):
            channel.connect(lambda message, rank=rank: self.say(rank, message), lambda task: task.run())  # type: ignore[misc]
            memory = SharedMemory(os.dup(file), rank)
            self.runtimes.append(types.SimpleNamespace(
                world=types.SimpleNamespace(rank=rank, size=size), departed=self.departed,
                connections=types.SimpleNamespace(oob=channel, heaps=dict(enumerate(memory.heaps(size))))))
        os.close(file)

    def say(self, rank: int, message: Any) -> None:
        with self.lock:
            self.store.receive(rank, message)
            for direct in self.store.take_direct_messages():
                self.channels[direct.rank].receive(direct.oob_messages)

    def leave(self, rank: int) -> None:
        self.departed.add(rank)
        for channel in self.channels:
            channel.look()

    def meeting(self, rank: int, ranks: Sequence[int], hosts: Sequence[str] = (), *, nbytes: int = 100_000,
                name: str = "group", **more: Any) -> GroupMeeting:
        index = list(ranks).index(rank)
        of_hosts = Hosts.of(hosts or ["one host"] * len(ranks))
        members = GroupMembers(name, index, tuple(ranks), of_hosts, tuple(map(str, ranks)))
        return GroupMeeting(self.runtimes[rank], members, nbytes, **more)


def met(job: Job, meetings: Sequence[GroupMeeting], seconds: float = HANGS_SECONDS) -> list[Any]:
    """Let ranks meet; return what each got, or the error."""
    results: list[Any] = [None] * len(meetings)

    def run(index: int) -> None:
        try:
            results[index] = meetings[index].meet(time.monotonic() + seconds)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_SECONDS)
        assert not thread.is_alive()
    return results


# docs/protocol.md#meetings
def test_all_share_an_identity_and_each_host_its_memory() -> None:
    job, ranks = Job(5), (3, 1, 4, 0)  # in the order of the group; rank 2 is not in it
    hosts = ("b", "a", "b", "a")
    first, second = (met(job, [job.meeting(rank, ranks, hosts) for rank in ranks]) for _ in range(2))
    places: list[MeetingPlace] = [*first, *second]
    assert len({place.identity for place in first}) == len({place.identity for place in second}) == 1
    assert first[0].identity != second[0].identity
    assert first[0].memory.start == first[2].memory.start and first[1].memory.start == first[3].memory.start
    assert len({place.memory.start for place in places}) == 4
    first[0].memory.allocate(0, 10)
    first[0].memory.bytes[:10] = 7
    assert (first[2].memory.bytes[:10] == 7).all() and not second[2].memory.bytes[:10].any()


def test_ranks_that_do_not_agree_on_the_members_all_raise() -> None:
    job = Job(2)
    for error in met(job, [job.meeting(0, (0, 1)), job.meeting(1, (0, 1, 2))]):
        assert isinstance(error, LaunchError)
        assert "the ranks do not agree on its members: [0, 1] on rank 0, [0, 1, 2] on rank 1" in str(error)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_in_time(absent: int) -> None:
    job, begun = Job(3), time.monotonic()
    for error in met(job, [job.meeting(rank, (0, 1, 2)) for rank in range(3) if rank != absent], 0.2):
        assert isinstance(error, LaunchError) and f"has waited in vain for rank {absent}; all 3 ranks must" in str(error)
    assert time.monotonic() - begun < 0.2 + meeting.ANSWER_SECONDS + 5
    places = met(job, [job.meeting(rank, (0, 1, 2)) for rank in range(3)])
    assert len({place.identity for place in places}) == 1, "what the first try has left does no harm"


def test_a_rank_that_has_given_up_is_not_counted() -> None:
    job = Job(2)
    (error,) = met(job, [job.meeting(1, (0, 1))], 0.0)
    assert isinstance(error, LaunchError)
    (error,) = met(job, [job.meeting(0, (0, 1))], 0.1)
    assert "in vain for rank 1" in str(error)


@pytest.mark.parametrize("left", [0, 2])
def test_a_rank_that_has_left_the_job_ends_the_meeting_at_once(left: int) -> None:
    for before in (True, False):
        job = Job(3)
        meetings = [job.meeting(rank, (0, 1, 2)) for rank in range(3) if rank != left]
        if before:
            job.leave(left)
        else:
            threading.Timer(0.1, lambda job=job: job.leave(left)).start()  # type: ignore[misc]
        for error in met(job, meetings):
            assert isinstance(error, PeerLeftError) and error.rank == left, error
            assert f"rank {left} left the job" in str(error)


def test_a_job_that_fails_ends_the_meeting_at_once() -> None:
    job = Job(3)
    lost = HorovodInternalError("rank 2 was lost")
    threading.Timer(0.1, lambda: [channel.close(lost) for channel in job.channels]).start()
    for error in met(job, [job.meeting(rank, (0, 1, 2)) for rank in range(2)]):
        assert isinstance(error, HorovodInternalError) and "rank 2 was lost" in str(error)


def test_no_memory_on_one_host_is_an_error_of_all() -> None:
    job = Job(3)

    def no_memory(nbytes: int) -> None:
        raise MemoryError(f"no range of {nbytes} bytes")

    job.runtimes[2].connections.heaps[2].take = no_memory
    one, two, three = met(job, [job.meeting(rank, (0, 1, 2), ("a", "a", "b")) for rank in range(3)])
    assert isinstance(three, MemoryError)
    for error in (one, two):
        assert isinstance(error, LaunchError) and "rank 2: no range of 100000 bytes" in str(error)


def test_who_waits_long_tells_once_who_is_absent(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(3)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        met(job, [job.meeting(rank, (0, 1, 2), patience=0.05) for rank in range(2)], 0.3)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "group: rank 0 has waited 0 s for rank 2 to make the group",
        "group: rank 1 has waited 0 s for rank 0 to make the group"]
