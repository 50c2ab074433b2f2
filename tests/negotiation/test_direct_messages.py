"""What the coordinator tells single ranks: received splits of alltoalls, and out-of-band messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from hvdlite.core.types import Collective
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.messages import (
    Decision,
    DirectMessage,
    OobKey,
    OobMessage,
    ReceiveSplits,
    Report,
    Request,
    Response,
    SideMessage,
)
from hvdlite.negotiation.negotiator import Policy
from hvdlite.negotiation.oob_store import OobStore


def decided(coordinator: Coordinator) -> Decision:
    decision = coordinator.decide()
    assert decision is not None
    return decision


def report_splits(coordinator: Coordinator, rank: int, splits: Sequence[int], process_set: int = 0) -> None:
    request = Request("x", Collective.ALLTOALL, "float32", (sum(splits) + 1, 2), splits=tuple(splits),
                      process_set_id=process_set)
    coordinator.receive(rank, Report(epoch=0, applied=0, items=(request,)), 0.0)


def test_each_rank_is_told_its_own_column_of_an_alltoall() -> None:
    coordinator = Coordinator(3, Policy())
    for rank, row in enumerate(((1, 2, 3), (0, 5, 0), (4, 4, 4))):
        report_splits(coordinator, rank, row)
    (response,) = decided(coordinator).responses
    assert response.rows == (12, 11) and response.row_elements == 2
    assert coordinator.take_direct_messages() == (
        DirectMessage(epoch=0, rank=0, receive_splits=(ReceiveSplits(0, "x", (1, 0, 4), (0, 0, 0)),)),
        DirectMessage(epoch=0, rank=1, receive_splits=(ReceiveSplits(0, "x", (2, 5, 4), (1, 0, 4)),)),
        DirectMessage(epoch=0, rank=2, receive_splits=(ReceiveSplits(0, "x", (3, 0, 4), (3, 5, 8)),)))
    assert coordinator.take_direct_messages() == ()


def test_a_rank_that_has_joined_sends_nothing_and_is_told_what_it_gets() -> None:
    coordinator = Coordinator(2, Policy())
    coordinator.receive(1, Report(epoch=0, applied=0, items=(Request("join", Collective.JOIN, "uint8", (0,)),)), 0.0)
    report_splits(coordinator, 0, (2, 3))
    (response,) = decided(coordinator).responses
    assert response.contributors == (0,) and response.rows == (5, 3)
    assert coordinator.take_direct_messages() == (
        DirectMessage(epoch=0, rank=0, receive_splits=(ReceiveSplits(0, "x", (2, 0), (0, 0)),)),
        DirectMessage(epoch=0, rank=1, receive_splits=(ReceiveSplits(0, "x", (3, 0), (2, 0)),)))


# docs/protocol.md#direct-messages
def test_what_all_ranks_are_told_of_an_alltoall_does_not_grow_with_them() -> None:
    def nbytes(size: int) -> int:
        coordinator = Coordinator(size, Policy())
        for rank in range(size):
            report_splits(coordinator, rank, (200,) * size)
        (response,) = decided(coordinator).responses
        return len(msgspec.msgpack.encode(msgspec.structs.replace(response, contributors=())))

    assert nbytes(64) < nbytes(4) + 16


def test_only_members_of_a_process_set_get_splits() -> None:
    coordinator = Coordinator(3, Policy())
    added = Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=(0, 2))
    for rank in range(3):
        coordinator.receive(rank, Report(epoch=0, applied=0, items=(added,)), 0.0)
    assert isinstance(decided(coordinator).responses[0], Response)
    for rank in (0, 2):
        report_splits(coordinator, rank, (1, 1), process_set=1)
    decided(coordinator)
    assert [message.rank for message in coordinator.take_direct_messages()] == [0, 2]


def test_a_refused_alltoall_has_no_splits() -> None:
    coordinator = Coordinator(2, Policy())
    report_splits(coordinator, 0, (1, 1))
    coordinator.receive(1, Report(epoch=0, applied=0,
                                  items=(Request("x", Collective.ALLTOALL, "int32", (2, 2), splits=(1, 1)),)), 0.0)
    assert decided(coordinator).responses[0].error_text
    assert coordinator.take_direct_messages() == ()


def tell(store: OobStore, rank: int, side_message: SideMessage) -> tuple[DirectMessage, ...]:
    store.receive(rank, side_message)
    return store.take_direct_messages()


@pytest.mark.parametrize("fetched_first", [True, False])
def test_a_published_message_goes_to_ranks_that_fetch_it_before_or_after(fetched_first: bool) -> None:
    store = OobStore(0)
    message, key = OobMessage("gloo.0", 1, b"text"), OobKey("gloo.0", 1)
    if fetched_first:
        assert tell(store, 3, SideMessage(oob_requests=(key,))) == ()
        assert tell(store, 1, SideMessage(oob_messages=(message,))) == (
            DirectMessage(epoch=0, rank=3, oob_messages=(message,)),)
    else:
        assert tell(store, 1, SideMessage(oob_messages=(message,))) == ()
        assert tell(store, 3, SideMessage(oob_requests=(key,))) == (DirectMessage(epoch=0, rank=3, oob_messages=(message,)),)
    assert tell(store, 2, SideMessage(oob_requests=(key,))) == (DirectMessage(epoch=0, rank=2, oob_messages=(message,)),)
    assert tell(store, 1, SideMessage(oob_withdrawn=("gloo.0",))) == ()
    assert tell(store, 0, SideMessage(oob_requests=(key,))) == ()


def test_an_addressed_message_goes_to_those_ranks_only() -> None:
    store = OobStore(0)
    message = OobMessage("nccl.0", 2, b"text", (0, 3))
    sent = OobMessage("nccl.0", 2, b"text")
    assert tell(store, 2, SideMessage(oob_messages=(message,))) == (
        DirectMessage(epoch=0, rank=0, oob_messages=(sent,)), DirectMessage(epoch=0, rank=3, oob_messages=(sent,)))
