"""Whose link is slow, from what the ranks' connections carried and how long that took.

The ends of a connection know it by the same two addresses, so the ledgers of both ranks together tell who sends to whom. All
connections that a slow link carries, and only those, are slow: those of one rank, or of one host, in one direction or both.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Final

from hvdlite.core.ledger import Ledger, Traffic

LEAST_RATIO: Final = 2.0
"""How many times as fast as all connections of a slow link together every other one must be."""
LEAST_BYTES: Final = 0.1
"""Of what the connection that carried most has carried. Others carry messages, of which the kernel may acknowledge the last
one only after 40 ms: their rates say nothing.
"""
LEAST_SECONDS: Final = 0.1
"""How long data must have been under way in the slowest connection: the kernel counts this time in ticks of up to 10 ms."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """What a rank has sent to another one.

    Attributes:
        share: of the time, in which something was on its way; 0..1.
        rate: bytes a second in that time.
    """

    sender: int
    receiver: int
    share: float
    rate: float

    def __str__(self) -> str:
        return f"From rank {self.sender} to rank {self.receiver} it is {self.rate / 1e6:,.1f} MB/s while data is under way"


@dataclasses.dataclass(frozen=True)
class SlowLink:
    """A rank's link that is slower than others'.

    Attributes:
        ranks: those that share the link; the first one is an end of `flow`.
        flow: the slowest connection.
        usual: bytes a second of the median of the other connections.
        share: of the time, which goes away if the link is as fast as others.
    """

    ranks: tuple[int, ...]
    flow: Flow
    usual: float
    share: float


def flows(ledgers: Mapping[int, Ledger]) -> list[Flow]:
    """Return what ranks have sent each other between hosts, without the connections that carried little."""
    owners = {each.local: rank for rank, ledger in ledgers.items() for each in ledger.traffic}
    known = [(rank, each) for rank, ledger in ledgers.items() for each in ledger.traffic if each.remote in owners]
    least = LEAST_BYTES * max((each.sent for _, each in known), default=0)
    found: dict[tuple[int, int], list[Traffic]] = {}
    for rank, each in known:
        if each.sent > least and each.sending > 0:
            found.setdefault((rank, owners[each.remote]), []).append(each)
    return [_flow(*between, carried, ledgers[between[0]].seconds) for between, carried in sorted(found.items())]


def _flow(sender: int, receiver: int, carried: list[Traffic], seconds: float) -> Flow:
    sending = max(each.sending for each in carried)  # several send at the same time
    return Flow(sender, receiver, min(1.0, sending / seconds), sum(each.sent for each in carried) / sending)


def slow_link(ledgers: Mapping[int, Ledger]) -> SlowLink | None:
    """Return whose link is slow; None if none is, or if there is no other one to compare it with."""
    known = flows(ledgers)
    if not known:
        return None
    slowest = min(known, key=lambda flow: flow.rate)
    if slowest.share * ledgers[slowest.sender].seconds < LEAST_SECONDS:
        return None
    for sending, receiving in _explanations(slowest, ledgers):
        carried = max(sum(flow.rate for flow in known if flow.sender in sending),  # at the same time, perhaps: they share it
                      sum(flow.rate for flow in known if flow.receiver in receiving))
        outside = [flow for flow in known if flow.sender not in sending and flow.receiver not in receiving]
        if outside and LEAST_RATIO * carried <= min(flow.rate for flow in outside):
            usual = statistics.median(flow.rate for flow in outside)
            crowd = max(ledgers[rank].queued / ledgers[rank].seconds for rank in (slowest.sender, slowest.receiver))
            return SlowLink(sending or receiving, slowest, usual, slowest.share * (1 - slowest.rate / usual) - crowd)
    return None


def _explanations(slowest: Flow, ledgers: Mapping[int, Ledger]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield ranks whose sending, and ranks whose receiving may be slow, given the slowest connection; simple ones first."""
    hosts = {rank: {each.local.rpartition(":")[0] for each in ledger.traffic} for rank, ledger in ledgers.items()}
    alone = (slowest.sender,), (slowest.receiver,)
    sharing = [(end, *(rank for rank in hosts if rank != end and hosts[rank] & hosts[end])) for (end,) in alone]
    for sender, receiver in (alone, sharing):
        yield sender, sender
        yield receiver, receiver
    for sender, receiver in (alone, sharing):
        yield sender, ()
        yield (), receiver
