"""The communicator of a world from that of the lost one, over a double."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError
from hvdlite.planes.nccl import shrinking
from hvdlite.planes.nccl.communicator import NcclOptions
from hvdlite.planes.nccl.shrinking import CommunicatorKeeper, KeptInfo, excluded_ranks
from tests.planes.communicator_double import Meetings, NcclErrorDouble
from tests.planes.test_nccl_windows import Ranks, memory, reduce
from tests.worlds import HANGS_SECONDS

LOST = HorovodInternalError("a rank was lost")
OPTIONS = NcclOptions(windows=True, blocking=False, shrink=True)


@pytest.mark.parametrize(("infos", "expected"), [
    ([("a", 0, 3), ("a", 2, 3)], (1,)), ([("a", 1, 4), ("a", 2, 4)], (0, 3)),
    ([("a", 0, 2), ("a", 1, 2)], ()),  # all of them
    ([("a", 2, 3), ("a", 0, 3)], ()),  # in another order
    ([("a", 0, 3), None], ()),  # a new rank
    ([("a", 0, 3), ("b", 1, 3)], ())])  # of other worlds
def test_which_ranks_are_excluded(infos: list[tuple[str, int, int] | None], expected: tuple[int, ...]) -> None:
    assert excluded_ranks([None if info is None else KeptInfo(info[0].encode(), *info[1:]) for info in infos]) == expected


class Members:
    """Processes of an elastic job, which are ranks of one world after the other, by the number of the member."""

    def __init__(self, size: int) -> None:
        self.meetings = Meetings()
        self.keepers = [CommunicatorKeeper() for _ in range(size)]

    def world(self, members: list[int]) -> Ranks:
        """Return a world of these members, with its communicator."""
        ranks = Ranks(len(members), self.meetings, [{"keeper": self.keepers[member]} for member in members], options=OPTIONS)
        for gpu in ranks.gpus:
            gpu.blocking = False
        return ranks


def use(ranks: Ranks) -> list[Any]:
    """Reduce a bucket; return each rank's communicator."""
    def step(each: Any, rank: int) -> Any:
        own = memory(ranks, each)
        reduce(ranks, each, own.part(0, 8, np.dtype(np.float32)))
        (communicator,) = ranks.gpus[rank].communicators
        return communicator
    return ranks.run(step)


def lose(members: Members, ranks: Ranks, dead: int) -> None:
    """Lose a world in which a member has died."""
    ranks.run(lambda each, rank: each.close(LOST))
    members.keepers[dead].close()  # the process has ended
    for gpu in ranks.gpus:
        gpu.end()


def test_survivors_make_their_communicator_from_the_lost_worlds() -> None:
    members = Members(3)
    first = members.world([0, 1, 2])
    parents = use(first)
    lose(members, first, 1)
    assert [each.ended for each in parents] == [False, True, False] and all(each.revoked for each in parents)
    second = members.world([0, 2])
    children = use(second)
    assert [each.size for each in children] == [2, 2]
    assert children[0]._meeting is parents[0]._meeting.children[(1,)] and parents[0].ended and parents[2].ended
    lose(members, second, 0)
    third = members.world([2])
    assert use(third)[0].size == 1
    third.end()
    assert all(each.ended for each in children)


@pytest.mark.parametrize(("members", "fails"), [([0, 3], False), ([2, 0], False), ([0, 2], True)],
                         ids=["a new member", "another order", "it fails"])
def test_otherwise_they_connect_again(members: list[int], fails: bool) -> None:
    processes = Members(4)
    first = processes.world([0, 1, 2])
    parents = use(first)
    lose(processes, first, 1)
    second = processes.world(members)
    if fails:  # NCCL waits for all ranks
        second.gpus[1].shrink_fault = NcclErrorDouble("an error of its own")
        second.gpus[0].shrink_fault = NcclErrorDouble("it takes longer than 20 s")
    children = use(second)
    assert not parents[0]._meeting.children and all(each.size == 2 for each in children)
    second.end()
    for keeper in processes.keepers:
        keeper.close()
    assert all(each.ended for each in [*parents, *children])


def test_nobody_uses_a_communicator_before_all_ranks_have_it() -> None:
    """The time limit is that of `ncclCommShrink`; the first collective has none."""
    processes = Members(3)
    first = processes.world([0, 1, 2])
    use(first)
    lose(processes, first, 1)
    second = processes.world([0, 2])
    made: list[Any] = []
    for rank, gpu in enumerate(second.gpus):
        def shrink(*arguments: Any, rank: int = rank, real: Any = gpu.shrink) -> Any:
            made.append(child := real(*arguments))
            if rank == 1:
                child.abort()
                raise NcclErrorDouble("it takes longer than 20 s")
            return child
        gpu.shrink = shrink  # type: ignore[method-assign]
    second.run(lambda each, rank: memory(second, each))
    assert len(made) == 2 and not any(next(each._calls) for each in made) and all(each.ended for each in made)
    second.end()


def test_an_abort_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "ABORT_SECONDS", 0.01)
    members, ended = Members(2), threading.Event()
    ranks = members.world([0, 1])
    parents = use(ranks)
    ranks.run(lambda each, rank: each.close(LOST))
    for parent, gpu, keeper in zip(parents, ranks.gpus, members.keepers, strict=True):
        def abort(real: Any = parent.abort) -> None:
            assert ended.wait(HANGS_SECONDS)
            real()
        parent.abort = abort
        keeper.close()
        assert not parent.ended
        gpu.end()
    ended.set()


def test_a_world_that_is_left_keeps_nothing() -> None:
    members = Members(2)
    ranks = members.world([0, 1])
    communicators = use(ranks)
    ranks.end()
    assert all(each.ended for each in communicators) and all(keeper.take() is None for keeper in members.keepers)


def test_a_kept_communicator_gives_way_to_the_next_and_ends_with_the_job() -> None:
    members = Members(3)
    first = members.world([0, 1, 2])
    parents = use(first)
    lose(members, first, 2)
    second = members.world([0, 1])
    second.planes[0].close(LOST)  # lost before it has a communicator
    second.planes[1].close(LOST)
    assert not parents[0].ended
    for keeper in members.keepers:
        keeper.close()
    assert all(each.ended for each in parents)
    for gpu in second.gpus:
        gpu.end()
