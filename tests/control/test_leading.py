"""What a host's leader makes of messages and deaths."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hvdlite.control.doorbell import Doorbell
from hvdlite.control.star import GRACE_SECONDS, LeaderControl, PeerLost
from hvdlite.control.wire import Connection
from hvdlite.core.types import Collective
from hvdlite.negotiation.leader import Leader
from hvdlite.negotiation.messages import (
    Decision,
    DirectMessage,
    DirectMessages,
    FailureNotice,
    HostReport,
    Message,
    OobMessage,
    RankReport,
    Report,
    Request,
)

# Nobody waits with that
SAYS = Report(epoch=0, applied=0, items=(Request("x", Collective.ALLREDUCE, "float32", (1,), payload=b"1234"),))


class Host:
    """Ranks 2 and 3: the leader's control plane, and what rank 0 and rank 3 hold of their connections to it."""

    def __init__(self) -> None:
        self._pairs = {peer: socket.socketpair() for peer in (0, 3)}
        links = {peer: Connection(ours) for peer, (ours, _) in self._pairs.items()}
        self.control = LeaderControl(Leader((2, 3), 4), links, {2: Doorbell(), 3: Doorbell()}, {}, heartbeat_timeout=60)
        self.rank_0, self.rank_3 = (Connection(theirs) for _, theirs in self._pairs.values())

    def sent(self, to: Connection) -> Message:
        """Block until a message for rank 0 or rank 3 is there."""
        to.socket.settimeout(5.0)
        to.socket.recv(1, socket.MSG_PEEK)
        (message,) = to.receive()
        return message


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.control.close()
    for connection in (host.rank_0, host.rank_3):
        connection.close()


def test_reports_go_up_and_are_no_events(host: Host) -> None:
    host.rank_3.send(SAYS)
    assert host.control.wait(5.0) == []
    assert host.sent(host.rank_0) == HostReport(epoch=0, applied=0, items=(RankReport(3, SAYS),))
    host.control.send_report(SAYS)
    assert host.sent(host.rank_0) == HostReport(epoch=0, applied=0, items=(RankReport(2, SAYS),))


def test_direct_messages_go_to_their_ranks_only_and_before_what_follows(host: Host) -> None:
    mine, theirs = (DirectMessage(epoch=0, rank=rank, oob_messages=(OobMessage("x", 0, b"%d" % rank),)) for rank in (2, 3))
    host.rank_0.send(DirectMessages((mine, theirs)))
    host.rank_0.send(Decision(epoch=0, sequence=1))
    events = host.control.wait(5.0)
    while len(events) < 2:
        events += host.control.wait(5.0)
    assert events == [mine, Decision(epoch=0, sequence=1)]
    host.rank_3.socket.settimeout(5.0)
    received: list[Message] = []
    while len(received) < 2:
        host.rank_3.socket.recv(1, socket.MSG_PEEK)
        received += host.rank_3.receive()
    assert received == [DirectMessages((theirs,)), Decision(epoch=0, sequence=1)]


def test_decisions_go_down(host: Host) -> None:
    host.rank_0.send(Decision(epoch=0, sequence=1))
    assert host.control.wait(5.0) == [Decision(epoch=0, sequence=1)]
    assert host.sent(host.rank_3) == Decision(epoch=0, sequence=1)


def test_a_decision_comes_from_the_parent_only(host: Host) -> None:
    host.rank_3.send(Decision(epoch=0, sequence=1))
    (event,) = host.control.wait(5.0)
    assert isinstance(event, PeerLost) and event.rank == 3 and "out of place" in event.reason


def test_a_death_goes_up_behind_the_last_word(host: Host) -> None:
    host.rank_3.send(SAYS)
    host.rank_3.close()
    host.control.wait(5.0)
    first = host.sent(host.rank_0)
    if isinstance(first, HostReport) and not first.lost:  # the end was read after the word
        assert first.items == (RankReport(3, SAYS),)
        host.control.wait(5.0)
        first = host.sent(host.rank_0)
    assert isinstance(first, HostReport) and [rank for rank, _ in first.lost] == [3]


def test_a_death_about_which_rank_0_says_nothing_is_declared_after_the_grace(host: Host) -> None:
    host.rank_3.close()
    events = host.control.wait(5.0)
    while not events:
        events = host.control.wait(10 * GRACE_SECONDS)
    (event,) = events
    assert isinstance(event, PeerLost) and event.rank == 3


def test_the_host_is_told_of_a_failure_that_its_leader_knows_first(host: Host) -> None:
    host.rank_0.close()
    (event,) = host.control.wait(5.0)
    assert isinstance(event, PeerLost) and event.rank == 0
    lost = FailureNotice(0, "lost", event.reason)
    host.control.send_report(Report(epoch=0, applied=0, failure=lost))
    told = host.sent(host.rank_3)
    assert isinstance(told, Decision) and told.failure == lost
