"""The link of a member with its launcher: a socket whose other end is the test."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.bootstrap import member_client
from hvdlite.bootstrap.member_client import MemberClient
from hvdlite.bootstrap.rendezvous import Cancellation
from hvdlite.core.errors import HostsUpdatedInterrupt, LaunchError, PeerLostError, WorldEnded
from hvdlite.core.launch_contract import MEMBER_SOCKET
from hvdlite.membership.messages import (
    JOIN,
    Alive,
    AllFinished,
    AskAlive,
    BoundaryReport,
    CoordinatorAt,
    Dismissed,
    Listening,
    MemberFinished,
    MemberFrames,
    MemberHello,
    MemberReady,
    MembershipMessage,
    PrepareStop,
    StopAt,
    StopNow,
    WorldOrder,
    frame,
)


class Launcher:
    """The launcher's end of the link."""

    def __init__(self, directory: Path) -> None:
        self._frames = MemberFrames(orders=False)
        self._heard: list[Any] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(directory / MEMBER_SOCKET))
            listener.listen(1)
            self.member = MemberClient(str(directory), 7)
            self.socket, _ = listener.accept()
        self.socket.settimeout(30)

    def heard(self) -> Any:
        """Return the next message of the member."""
        while not self._heard:
            self._heard += self._frames.feed(self.socket.recv(1 << 16))
        return self._heard.pop(0)

    def order(self, *orders: MembershipMessage) -> None:
        """Send orders."""
        self.socket.sendall(b"".join(map(frame, orders)))


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    assert isinstance(made.heard(), MemberHello)
    yield made
    made.socket.close()


def world(epoch: int) -> WorldOrder:
    return WorldOrder(epoch=epoch, members=(7,), ranks_by_machine=((0,),), host_names=("127.0.0.1",), restore=True,
                      commits=0)


def beside(action: Callable[[], object]) -> Callable[[], Any]:
    """Run something in another thread; return a function that returns its result, or raises its exception."""
    results: list[Any] = []

    def body() -> None:
        try:
            results.append(action())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(30)
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]
    return result


def test_all_members_stop_at_the_same_boundary(launcher: Launcher) -> None:
    member = launcher.member
    for _ in range(3):
        member.boundary(0)
    assert not member.is_to_stop
    launcher.order(PrepareStop(1))
    assert launcher.heard() == BoundaryReport(1, 3)
    assert member.is_to_stop
    fourth = beside(lambda: member.boundary(0))  # waits for the answers of others
    launcher.order(StopAt(1, 5))  # one of them had passed the fourth
    fourth()
    with pytest.raises(HostsUpdatedInterrupt):
        member.boundary(0)
    assert member.is_at_rest and not member.is_behind
    with pytest.raises(WorldEnded, match="has caught HostsUpdatedInterrupt"):
        member.boundary(0)
    assert member.is_behind
    launcher.order(world(2))
    assert member.next_order() == world(2)
    assert not member.is_at_rest and not member.is_to_stop
    launcher.order(PrepareStop(2))
    assert launcher.heard() == BoundaryReport(2, 0)  # joiners have passed none of the earlier ones


def test_boundaries_before_a_join_of_all_count_less_than_any_after_it(launcher: Launcher) -> None:
    member = launcher.member
    for _ in range(3):
        member.boundary(0)
    launcher.order(PrepareStop(1))
    assert launcher.heard() == BoundaryReport(1, 3)
    launcher.order(StopAt(1, 41))  # another member has passed 40 of them
    with pytest.raises(HostsUpdatedInterrupt):
        member.boundary(1)
    launcher.order(world(2))
    member.next_order()
    member.boundary(0)
    member.boundary(1)
    member.boundary(1)
    launcher.order(PrepareStop(2))
    assert launcher.heard() == BoundaryReport(2, JOIN + 2)


def test_a_member_that_waits_in_join_stops_when_the_others_do(launcher: Launcher) -> None:
    member = launcher.member
    member.left_in_join()  # others have left for a reason of theirs
    launcher.order(PrepareStop(1))
    assert launcher.heard() == BoundaryReport(1, 0)
    waiting = beside(member.left_in_join)
    launcher.order(StopAt(1, 41))
    with pytest.raises(HostsUpdatedInterrupt):
        waiting()
    assert member.is_at_rest and member.is_behind
    launcher.order(world(2))
    member.next_order()
    assert not member.is_at_rest and not member.is_behind
    launcher.order(PrepareStop(2))
    launcher.heard()
    waiting = beside(member.left_in_join)
    launcher.order(StopNow(2, "rank 1 was lost"))
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        waiting()
    assert not member.is_at_rest


def test_a_death_replaces_a_stop_that_is_being_agreed_on(launcher: Launcher) -> None:
    launcher.order(PrepareStop(1))
    launcher.heard()
    waiting = beside(lambda: launcher.member.boundary(0))
    launcher.order(StopNow(1, "rank 1 was lost"))
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        waiting()
    assert not launcher.member.is_at_rest and launcher.member.is_to_stop


def test_the_links_thread_says_whether_the_training_thread_computes(launcher: Launcher) -> None:
    launcher.order(AskAlive(1))
    assert launcher.heard() == Alive(1, in_user_code=False)
    launcher.member.attach(1, lambda reason: None, lambda: True)
    launcher.order(StopNow(1, "rank 1 was lost"), AskAlive(1))
    assert launcher.heard() == Alive(1, in_user_code=True)
    launcher.member.detach()
    launcher.order(AskAlive(1))
    assert launcher.heard() == Alive(1, in_user_code=False), "it ends its world"


def test_a_world_that_was_stopped_before_it_was_attached_is_stopped_at_once(launcher: Launcher) -> None:
    stops: list[str] = []
    launcher.member.attach(2, stops.append)
    launcher.order(world(2), StopNow(1, "an older one"), StopNow(2, "again"), world(3))
    assert launcher.member.next_order() == world(3)  # the newest
    assert stops == ["again"]
    launcher.member.attach(2, stops.append)
    launcher.member.attach(3, stops.append)
    assert stops == ["again", "again"]


def test_a_meeting_that_waits_for_the_coordinators_address_can_be_stopped(launcher: Launcher) -> None:
    member = launcher.member
    launcher.order(world(2))
    member.next_order()
    member.announce_coordinator(2, 1234)
    assert launcher.heard() == Listening(2, ("127.0.0.1",), 1234)
    launcher.order(CoordinatorAt(1, "old", 1), CoordinatorAt(2, "host", 1234))
    assert member.coordinator(2, 30) == ("host", 1234)
    waiting = beside(lambda: member.coordinator(3, 30))
    launcher.order(StopNow(3, "rank 0 was lost"))
    with pytest.raises(LaunchError, match="rank 0 was lost"):
        waiting()


def test_a_rank_0_that_never_says_where_it_listens_is_not_waited_for(launcher: Launcher) -> None:
    with pytest.raises(LaunchError, match="HVDLITE_START_TIMEOUT"):
        launcher.member.coordinator(2, 0.01)


def test_training_finishes_on_all_members_or_goes_on_in_another_world(launcher: Launcher) -> None:
    first = beside(lambda: launcher.member.finish(1))
    assert launcher.heard() == MemberFinished(1)
    launcher.order(StopNow(1, "rank 1 was lost"))
    assert first() is False
    second = beside(lambda: launcher.member.finish(2))
    launcher.order(AllFinished())
    assert second() is True


def test_a_stop_that_was_prepared_when_training_finished_stops_nothing_later(launcher: Launcher) -> None:
    for _ in range(3):
        launcher.member.boundary(0)
    launcher.order(PrepareStop(1))
    assert launcher.heard() == BoundaryReport(1, 3)
    finishing = beside(lambda: launcher.member.finish(1))
    assert launcher.heard() == MemberFinished(1)
    launcher.order(AllFinished())
    assert finishing() is True
    launcher.member.boundary(0)  # it would block
    launcher.member.ready()
    assert launcher.heard() == MemberReady()
    launcher.order(PrepareStop(2))
    assert launcher.heard() == BoundaryReport(2, 0), "what was passed outside of elastic.run does not count"


def test_a_member_that_is_not_needed_exits_with_code_0(launcher: Launcher) -> None:
    launcher.order(Dismissed("its host was removed"))
    with pytest.raises(SystemExit) as end:
        launcher.member.next_order()
    assert end.value.code == 0


def test_the_end_of_the_launcher_ends_whatever_waits_for_it(launcher: Launcher) -> None:
    cancellation = Cancellation()
    launcher.member.attach(2, cancellation.cancel)
    waiting = beside(launcher.member.next_order)
    launcher.socket.close()
    with pytest.raises(LaunchError, match="cannot be reached any more"):
        waiting()
    with pytest.raises(LaunchError, match="cannot be reached any more"):
        cancellation.check()


def test_a_member_that_cannot_take_an_order_does_not_wait_for_others(launcher: Launcher) -> None:
    """Else its process would live on without hearing any order."""
    launcher.member.attach(1, lambda reason: [][0])
    waiting = beside(launcher.member.next_order)
    launcher.order(StopNow(1, "rank 1 is gone"))
    with pytest.raises(LaunchError, match="IndexError"):
        waiting()


def test_a_member_without_a_launcher_says_so(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="its launcher does not answer"):
        MemberClient(str(tmp_path), 7)


@pytest.mark.parametrize("saves", [False, True])
def test_a_world_outlives_the_launcher_if_its_state_is_saved(launcher: Launcher, saves: bool,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last boundaries are passed, and what it writes to a pipe that nobody reads is lost."""
    (reader, writer), stops = os.pipe(), list[str]()
    monkeypatch.setattr(member_client, "_output_pipes", lambda: [writer])
    launcher.member.outlive_output()
    os.close(reader)
    os.write(writer, b"no broken pipe")
    launcher.member.attach(1, stops.append)
    launcher.member.saves_at_end = saves
    launcher.socket.close()
    with pytest.raises(LaunchError, match="cannot be reached any more"):
        launcher.member.next_order()
    assert launcher.member.is_ending == saves and len(stops) == (not saves)
    launcher.member.boundary(0)
    assert os.fstat(writer).st_ino == os.stat(os.devnull).st_ino or not saves
    os.close(writer)
