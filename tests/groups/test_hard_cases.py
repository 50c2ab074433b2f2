"""Groups in hard cases: ranks that leave, fork, are interrupted or have no more threads, at the worst moment."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError, LaunchError, PeerLeftError
from hvdlite.core.kernel_files import anonymous_file
from hvdlite.groups.group import Group
from hvdlite.handoff.group_state import GroupState
from hvdlite.memory import shared
from hvdlite.memory.area import Area, area_bytes
from tests.groups.programs import hard_cases as programs
from tests.groups.test_meeting import Job, met
from tests.groups.worlds import barrier, groups, play
from tests.worlds import HANGS_SECONDS, TORCH, Processes, processes, threads


def test_a_rank_that_closes_after_another_one_left_is_seen_to_leave() -> None:
    """A group that failed with PeerLeftError (or MemoryError) never writes LEFT: `Group._fail`."""
    left, closed = threading.Event(), threading.Event()

    def step(group: Group) -> Any:
        if group.rank == 0:
            group.close()
            left.set()
        elif group.rank == 1:
            assert left.wait(9)
            assert isinstance(group.start([barrier()], blocking=True).error, PeerLeftError)
            group.close()
            closed.set()
        else:
            assert closed.wait(9)
            call = group.receive(np.empty(8, np.uint8), 1, 0)
            call.wait(3)
            return call.is_done, call.error
        return None

    done, error = play(groups(3, messages=True), step)[2]
    assert done and isinstance(error, PeerLeftError)


def test_ranks_that_differ_in_the_order_of_members_all_hear_of_it() -> None:
    job = Job(3)
    meetings = [job.meeting(0, (0, 1, 2)), job.meeting(1, (0, 2, 1)), job.meeting(2, (0, 1, 2))]
    for error in met(job, meetings, 2.0):
        assert isinstance(error, LaunchError) and "do not agree" in str(error), error


def test_a_rank_that_is_no_member_of_the_others_group() -> None:
    job = Job(3)
    *first, third = met(job, [job.meeting(0, (0, 1)), job.meeting(1, (0, 1, 2)), job.meeting(2, (0, 1, 2))], 2.0)
    for error in first:
        assert isinstance(error, LaunchError) and "do not agree" in str(error), error
    assert isinstance(third, LaunchError), "the others may make that group later: it has waited"


def test_memory_of_a_host_is_not_given_away_while_its_other_ranks_have_it() -> None:
    """The first rank of host b gives up when the answer is on its way."""
    job, ranks, hosts = Job(3), (0, 1, 2), ("a", "b", "b")
    given_up = threading.Event()
    receive = job.channels[1].receive

    def late(messages: Any) -> None:  # rank 1 hears nothing before it has given up
        threading.Thread(target=lambda: (given_up.wait(20), receive(messages))).start()
    job.channels[1].receive = late  # type: ignore[method-assign]
    results: dict[int, Any] = {}

    def run(rank: int, seconds: float) -> None:
        try:
            results[rank] = job.meeting(rank, ranks, hosts).meet(time.monotonic() + seconds)
        except Exception as error:
            results[rank] = error
    workers = [threading.Thread(target=run, args=each) for each in ((0, 9.0), (1, 0.5), (2, 9.0))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    given_up.set()
    assert isinstance(results[1], LaunchError)
    heap = job.runtimes[1].connections.heaps[1]
    again = heap.take(100_000)  # the next group of host b
    assert isinstance(results[2], Exception) or again.start != results[2].memory.start, "two groups have one memory"


def test_a_heap_gives_zeros_where_pages_cannot_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """gVisor (ENOSYS), macOS, file systems without holes: the next group finds LEFT and LET_GO of the last one."""
    class NoRemove(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError("MADV_REMOVE")
    monkeypatch.setattr(shared.SharedMemory, "mapping", lambda self, start, nbytes, kind=None: NoRemove(
        self._open_file().descriptor, nbytes, offset=start))
    file = anonymous_file()
    heap = shared.SharedMemory(os.dup(file), 0).heaps(1)[0]
    os.close(file)
    first = heap.take(area_bytes(1))
    first.allocate(0, first.bytes.size)
    area = Area(first.bytes, 0, 1)
    lines = area.lines
    heap.lend([first], lambda: bool(lines[0][1]))
    area.leave(5)
    area.release()
    second = heap.take(area_bytes(1))
    assert not second.bytes.any()


def test_a_group_that_comes_while_the_background_thread_closes_fails() -> None:
    closing, over = threading.Event(), threading.Event()
    states = [GroupState("id", (0,), Area(bytearray(area_bytes(1)), 0, 1)) for _ in range(2)]

    def wrap(rank: int, plane: Any) -> Any:
        close = plane.close

        def slow() -> None:
            closing.set()
            assert over.wait(9)
            close()
        if rank == 1:
            plane.close = slow
        return plane

    def step(runtime: Any) -> Any:
        if runtime.world.rank == 0:
            return None
        runtime.leave()
        assert closing.wait(9)
        runtime.add_group(states[1])  # its meeting has just ended
        over.set()
        runtime.wait_until_left()
        return states[1].error

    error = threads(2, step, wrap=wrap)[1]
    assert isinstance(error, HorovodInternalError)


def test_a_thread_that_cannot_start_once_does_not_end_the_group() -> None:
    ends = groups(2)
    start, failed = threading.Thread.start, []

    def start_not(self: threading.Thread) -> None:
        if self.name.startswith("hvdlite-group") and not failed:
            failed.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    others = [ends[1].start([barrier()]) for _ in range(2)]
    with mock.patch.object(threading.Thread, "start", start_not):
        first = ends[0].start([barrier()])  # on this thread
    assert failed and first.is_done
    second = ends[0].start([barrier()])
    for call in (second, *others):
        assert call.wait(9) and call.error is None
    for end in ends:
        end.close()


def test_shutdown_with_an_open_group_is_seen_by_the_others(tmp_path: Path) -> None:
    results = [ended.result for ended in processes(3, programs.shut_down_with_an_open_group, str(tmp_path), 3)]
    for result in (results[0], results[2]):
        assert "PeerLeft" in result, results


@pytest.mark.parametrize("last", [0, 1])
def test_rings_come_back(tmp_path: Path, last: int) -> None:
    lent = [ended.result for ended in processes(2, programs.rings_come_back, str(tmp_path), 2, last)]
    assert max(lent) <= 3, lent


def test_a_forked_child_takes_no_messages(tmp_path: Path) -> None:
    _, answer = [ended.result for ended in processes(2, programs.a_child_asks_for_a_message, str(tmp_path), 2)]
    assert "child: 8; parent ended True, None, got 7" in answer, answer


def test_a_forked_child_does_not_hang(tmp_path: Path) -> None:
    _, answer = [ended.result for ended in processes(2, programs.a_child_with_the_lock, str(tmp_path), 2)]
    assert answer == "0", answer


@pytest.mark.parametrize("where", ["fallocate", "meeting"])
def test_the_background_thread_does_not_wait_for_a_script(tmp_path: Path, where: str) -> None:
    answers = [ended.result for ended in processes(2, programs.a_handler_in_the_middle_of, str(tmp_path), 2, where)]
    assert all("False" not in answer for answer in answers), answers


def test_rank_zeros_shutdown_with_an_open_group_is_seen_by_the_others(tmp_path: Path) -> None:
    results = [ended.result for ended in processes(2, programs.rank_zero_shuts_down_with_an_open_group, str(tmp_path), 2)]
    assert "PeerLeft" in results[1], results


def test_a_job_that_fails_just_after_a_meeting_is_the_reason(tmp_path: Path) -> None:
    with Processes(2, programs.a_job_that_fails_just_after_a_meeting, str(tmp_path), 2) as world:
        ended = world.wait(HANGS_SECONDS)
        assert "MemoryError" not in ended[0].result, ended[0]


def test_memory_of_a_group_that_one_rank_cannot_make_comes_back(tmp_path: Path) -> None:
    lent = [ended.result for ended in processes(2, programs.memory_of_a_group_that_one_rank_cannot_make, str(tmp_path), 2)]
    assert max(lent) <= 1, lent


def test_the_background_thread_does_not_wait_for_a_thread_that_meets(tmp_path: Path) -> None:
    answers = [ended.result for ended in processes(2, programs.a_handler_while_another_rank_announces, str(tmp_path), 2)]
    assert answers[0] == "[True]", answers


def test_a_thread_that_cannot_start_does_not_end_the_job(tmp_path: Path) -> None:
    with Processes(2, programs.no_more_threads, str(tmp_path), 2, hosts=[1, 1], imported=TORCH) as world:
        ended = world.wait(HANGS_SECONDS)
        assert [each.result for each in ended] == ["None", "None"], ended


def test_members_in_another_order_hear_of_it() -> None:
    """With `open_group`'s default timeout they wait for ever."""
    job = Job(2)
    for error in met(job, [job.meeting(0, (0, 1)), job.meeting(1, (1, 0))], 1.0):
        assert "do not agree" in str(error), error


@pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="only 3.12 starts no threads in atexit")
def test_messages_are_flushed_at_exit(tmp_path: Path) -> None:
    ended = processes(2, programs.sends_at_exit, str(tmp_path), 2)
    assert ended[1].result == "['None 0', 'None 1']", ended


def test_a_send_that_was_received_does_not_fail_because_the_receiver_leaves(tmp_path: Path) -> None:
    """A race, on several hosts: LEFT is heard within the plan that carries the message."""
    with Processes(2, programs.received_and_closed, str(tmp_path), 2, 300, hosts=[1, 1], imported=TORCH) as world:
        ended = world.wait(HANGS_SECONDS)
        assert str(ended[0].result).startswith("0 of"), ended


def test_a_rank_that_leaves_the_job_after_it_has_announced_ends_the_meeting() -> None:
    """Another thread of its process calls `shutdown`: there would be a group with a rank that has no runtime."""
    job = Job(2)
    late = job.meeting(1, (0, 1))
    threading.Thread(target=lambda: met(job, [late], 5.0), daemon=True).start()
    while not job.channels[0]._announced:
        time.sleep(0.01)
    job.departed.add(1)
    (error,) = met(job, [job.meeting(0, (0, 1))], 2.0)
    assert isinstance(error, PeerLeftError), error


def test_a_heap_that_is_closed_says_so_to_a_thread_that_takes() -> None:
    """Between the look and the `pop` of `take` everything may be gone."""

    class Lists(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            found = super().get(key, default)
            memory.close()  # the background thread
            return found

    file = anonymous_file()
    memory = shared.SharedMemory(file, 0)
    heap = memory.heaps(1)[0]
    heap.lend([heap.take(1)], lambda: True)
    heap.take_back()
    heap._free = Lists(heap._free)
    with pytest.raises(MemoryError, match="closed"):
        heap.take(1).allocate(0, 1)


def test_threads_make_use_and_close_overlapping_groups(tmp_path: Path) -> None:
    processes(3, programs.stress, str(tmp_path), 3, 20)


def test_ranks_that_close_at_random_moments_keep_nobody(tmp_path: Path) -> None:
    processes(3, programs.breaking, str(tmp_path), 3, 15)
