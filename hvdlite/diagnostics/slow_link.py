"""Whose link is slow, from what the ranks' connections carried and how long that took.

The ends of a connection know it by the same two addresses, so the ledgers of both ranks together tell who sends to whom. All
connections that a slow link carries, and only those, are slow: those of one rank, or of one host, in one direction or both.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Final

from hvdlite.core.ledger import Ledger, Link

LEAST_RATIO: Final = 2.0
"""How many times as fast every other connection must be."""
LEAST_BYTES: Final = 0.1
"""Of what the connection that carried most has carried. Others carry messages, of which the kernel may acknowledge the last
one only after 40 ms: their rates say nothing.
"""
LEAST_SECONDS: Final = 0.001
"""A tick of the kernel, in which it counts time."""


@dataclasses.dataclass(frozen=True)
class Way:
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
        ranks: those that share the link; the first one is an end of `way`.
        way: the slowest connection.
        usual: bytes a second of the median of the other connections.
        share: of the time, which goes away if the link is as fast as others.
    """

    ranks: tuple[int, ...]
    way: Way
    usual: float
    share: float


def ways(ledgers: Mapping[int, Ledger]) -> list[Way]:
    """Return what ranks have sent each other between hosts, without the connections that carried little."""
    owners = {link.local: rank for rank, ledger in ledgers.items() for link in ledger.links}
    known = [(rank, link) for rank, ledger in ledgers.items() for link in ledger.links if link.remote in owners]
    least = LEAST_BYTES * max((link.sent for _, link in known), default=0)
    found: dict[tuple[int, int], list[Link]] = {}
    for rank, link in known:
        if link.sent > least and link.sending >= LEAST_SECONDS:
            found.setdefault((rank, owners[link.remote]), []).append(link)
    return [_way(*between, links, ledgers[between[0]].seconds) for between, links in sorted(found.items())]


def _way(sender: int, receiver: int, links: list[Link], seconds: float) -> Way:
    sending = max(link.sending for link in links)  # several send at the same time
    return Way(sender, receiver, min(1.0, sending / seconds), sum(link.sent for link in links) / sending)


def slow_link(ledgers: Mapping[int, Ledger]) -> SlowLink | None:
    """Return whose link is slow; None if none is, or if there is no other one to compare it with."""
    known = ways(ledgers)
    if not known:
        return None
    slowest = min(known, key=lambda way: way.rate)
    for sending, receiving in _explanations(slowest, ledgers):
        inside = [way for way in known if way.sender in sending or way.receiver in receiving]
        outside = [way for way in known if way.sender not in sending and way.receiver not in receiving]
        if outside and LEAST_RATIO * max(way.rate for way in inside) <= min(way.rate for way in outside):
            usual = statistics.median(way.rate for way in outside)
            crowd = max(ledgers[rank].queued / ledgers[rank].seconds for rank in (slowest.sender, slowest.receiver))
            return SlowLink(sending or receiving, slowest, usual, slowest.share * (1 - slowest.rate / usual) - crowd)
    return None


def _explanations(slowest: Way, ledgers: Mapping[int, Ledger]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield ranks whose sending, and ranks whose receiving may be slow, given the slowest connection; simple ones first."""
    hosts = {rank: {link.local.rpartition(":")[0] for link in ledger.links} for rank, ledger in ledgers.items()}
    alone = (slowest.sender,), (slowest.receiver,)
    sharing = [(end, *(rank for rank in hosts if rank != end and hosts[rank] & hosts[end])) for (end,) in alone]
    for sender, receiver in (alone, sharing):
        yield sender, sender
        yield receiver, receiver
    for sender, receiver in (alone, sharing):
        yield sender, ()
        yield (), receiver
