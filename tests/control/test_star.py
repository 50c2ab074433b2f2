"""What a rank makes of its peers' ends."""

from __future__ import annotations

import socket
import threading

import pytest

from hvdlite.control import star, wire
from hvdlite.control.doorbell import Doorbell
from hvdlite.control.star import ControlPlane, PeerLost
from hvdlite.control.wire import Connection
from hvdlite.negotiation.messages import Decision, DirectMessage, DirectMessages, FailureNotice, Message, OobMessage, Report


def pair(ours: socket.socket | None = None, theirs: socket.socket | None = None) -> tuple[ControlPlane, Connection]:
    """Return rank 1's control plane and the connection that rank 0 holds."""
    if ours is None or theirs is None:
        ours, theirs = socket.socketpair()
    doorbells = {0: Doorbell(), 1: Doorbell()}
    control = ControlPlane(1, {0: Connection(ours)}, doorbells, {}, heartbeat_timeout=60)
    far = Connection(theirs)
    far.start()
    return control, far


def test_a_last_word_is_heard_although_the_connection_is_found_broken_by_sending() -> None:
    control, far = pair()
    control.send_report(Report(epoch=0, applied=0))  # never read by rank 0, so its close resets the connection
    last_word = Decision(epoch=0, sequence=1, failure=FailureNotice(2, "lost", "killed"))
    far.send(last_word)
    far.socket.close()
    control.send_report(Report(epoch=0, applied=0))
    assert control.wait(1.0)[0] == last_word
    control.close()


def test_the_end_of_rank_0_is_seen_at_once() -> None:
    control, far = pair()
    far.close()
    (event,) = control.wait(5.0)
    assert isinstance(event, PeerLost) and event.rank == 0
    control.close()


def test_a_message_out_of_place_is_a_fault_of_its_sender() -> None:
    control, far = pair()
    far.send(Report(epoch=0, applied=0))  # only rank 0 receives reports
    (event,) = control.wait(5.0)
    assert isinstance(event, PeerLost) and "out of place" in event.reason
    control.close()
    far.close()


def test_a_forked_childs_copy_can_be_forgotten_without_ending_the_connection() -> None:
    ours, theirs = socket.socketpair()
    copy = Connection(ours.dup())
    control, far = pair(ours, theirs)
    copy.close_in_child()
    far.send(Decision(epoch=0, sequence=1))
    assert control.wait(5.0) == [Decision(epoch=0, sequence=1)]
    control.close()
    control.close()
    far.close()


def test_ringing_wakes_a_wait_and_adds_up_to_nothing() -> None:
    control, far = pair()
    for _ in range(3):
        control.wake()
    assert control.wait(5.0) == []
    assert control.wait(0.0) == []
    control.close()
    control.wake()  # after the end: nobody listens, nothing breaks
    far.close()


def test_ringing_a_bell_while_it_is_closed_touches_no_other_file() -> None:
    for _ in range(200):
        doorbell = Doorbell()
        stop = threading.Event()
        errors: list[BaseException] = []

        def ring(doorbell: Doorbell = doorbell, stop: threading.Event = stop, errors: list[BaseException] = errors) -> None:
            try:
                while not stop.is_set():
                    doorbell.ring()
            except OSError as error:
                errors.append(error)

        worker = threading.Thread(target=ring)
        worker.start()
        doorbell.close()
        stop.set()
        worker.join()
        assert not errors


def hub(hosts: dict[int, tuple[int, ...]], peers: list[int], key: bytes = b"") -> tuple[ControlPlane, dict[int, Connection]]:
    """Return rank 0's control plane and what its peers hold of their connections."""
    pairs = {peer: socket.socketpair() for peer in peers}
    links = {peer: Connection(ours, send_key=key, receive_key=key) for peer, (ours, _) in pairs.items()}
    control = ControlPlane(0, links, {0: Doorbell()}, {}, heartbeat_timeout=60, hosts=hosts)
    far = {peer: Connection(theirs, send_key=key, receive_key=key) for peer, (_, theirs) in pairs.items()}
    return control, far


def close(control: ControlPlane, far: dict[int, Connection]) -> None:
    control.close()
    for connection in far.values():
        connection.close()


def test_a_decision_is_encoded_once_for_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    control, far = hub({}, [1, 2, 3], key=b"k" * 32)
    encoded: list[Message] = []
    real = star.encode
    for module in (star, wire):
        monkeypatch.setattr(module, "encode", lambda message: encoded.append(message) or real(message))
    decision = Decision(epoch=0, sequence=1)
    control.send_decision(decision)
    assert encoded == [decision]
    monkeypatch.undo()
    for connection in far.values():
        connection.start()
        assert connection.receive() == [decision]
    close(control, far)


def test_a_letter_goes_to_its_rank_or_the_leader_of_its_host() -> None:
    control, far = hub({2: (2, 3)}, [1, 2])
    messages = {rank: DirectMessage(epoch=0, rank=rank, oob_messages=(OobMessage("x", 0, b"%d" % rank),))
                for rank in (1, 2, 3)}
    control.send_direct_messages([DirectMessage(epoch=0, rank=0), *messages.values()])
    for connection in far.values():
        connection.start()
    assert far[1].receive() == [DirectMessages((messages[1],))]
    assert far[2].receive() == [DirectMessages((messages[2], messages[3]))]
    close(control, far)
