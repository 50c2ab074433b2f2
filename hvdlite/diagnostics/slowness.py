"""Why training is slow: which rank the others wait for, and why, or whose link is slow, from the ranks' ledgers.

In a step of data-parallel training all ranks wait for the slowest one, so the rank that waits least is the slow one. What it
uses more time for than the others is the likely cause. All of this is arithmetic on shares of time; see `core.ledger`.

Where all ranks wait alike, the cause may be a link. Both ends of a connection identify it by the same two addresses, so the
ledgers of both ranks together show who sends to whom. All connections that a slow link carries, and only those, are slow:
those of one rank, or of one host, in one direction or both.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Final

from hvdlite.core.ledger import Ledger, Traffic

LEAST_STEPS: Final = 5
"""Steps that a ledger must have."""
LEAST_EXCESS: Final = 0.1
"""The share of its time that a rank must use more than the median of the others, to be called slow."""
LEAST_COMPUTING: Final = 0.15
"""The same, where it only computes longer: cores of virtual machines differ by an eighth for minutes, unseen."""
LEAST_SPEEDUP: Final = 0.1
"""By how much shares of batches must speed a job up, to be advised."""
LEAST_COMMUNICATION: Final = 0.5
"""The share of its time that every rank must wait, for communication to be called slow."""
LEAST_ABSENT: Final = 0.5
"""Gradients that a rank, but not every rank, must lack in a step, for that to be called a cause of waiting."""
LEAST_RATIO: Final = 2.0
"""How many times as fast as all connections of a slow link together every other one must be."""
LEAST_BYTES: Final = 0.1
"""Of what the connection that carried most has carried. Others carry messages, of which the kernel may acknowledge the last
one only after 40 ms: their rates mean nothing.
"""
LEAST_SECONDS: Final = 0.1
"""How long data must have been under way in the slowest connection: the kernel counts this time in ticks of up to 10 ms."""

CAUSES: Final = {
    "input": "it waits longer for its input: more or faster loader processes, or a faster disk, would help",
    "cpu": "other processes or threads use its core: look for them with top, or give it more cores",
    "collection": "Python's garbage collection takes longer there: call gc.freeze() after the set-up, or collect less often",
    "waiting": "it waits for something else than a collective: a disk, a lock, another process, or a GPU",
    "computing": "it computes longer: more or longer samples, a slower core, or work that only this rank does",
    "communication": "no rank is late: the exchange itself takes this long (the link, the memory, or too few cores)",
    "absent": "gradients are missing there, so buckets wait for the end of its backward pass: are parameters frozen, or "
              "unused, on this rank only?",
    "link": "data takes longer between this rank and others: look at the speed and errors of its host's network interface, "
            "and at who else uses it",
}


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


@dataclasses.dataclass(frozen=True)
class Slowness:
    """Why a job is slow.

    Attributes:
        rank: the slow one; -1 when it is not one rank. Of "link", the first of those that share it.
        cause: a key of `CAUSES`.
        share: of the time of a step, which goes away with the cause, about; 0..1.
        excess: of the slow rank, by cause: the share of time that it uses more than the others; of "absent", the gradients.
        slowest: the slowest connection between hosts, of "link" and "communication", where it is known.
        link: the slow link, of "link".
        speedup: of "computing", how many times as fast the job would be with shares of batches by speed.
    """

    rank: int
    cause: str
    share: float
    excess: Mapping[str, float]
    slowest: Flow | None = None
    link: SlowLink | None = None
    speedup: float = 1.0

    def __str__(self) -> str:
        match self.cause:
            case "communication":
                who = "all ranks wait for each other"
            case "link":
                who = f"the link of {self._sharing()}"
            case _:
                who = f"rank {self.rank} is late"
        text = f"slow: {who}; {self.share:.0%} of each step. The likely cause: {CAUSES[self.cause]}"
        if self.speedup >= 1 + LEAST_SPEEDUP:
            text += (f". Shares of batches by speed would give {self.speedup:.1f} x: shares=\"auto\" of MirroredStrategy or "
                     "state.loop")
        if self.slowest is not None:
            text += f". {self.slowest}"
        if self.link is not None:
            text += f", between other ranks {self.link.usual / 1e6:,.1f} MB/s"
        return text

    def _sharing(self) -> str:
        ranks = (self.rank,) if self.link is None else self.link.ranks
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}, on one host,"

    def as_dict(self) -> dict[str, object]:
        """Return it for programs; rates are in bytes a second."""
        found: dict[str, object] = {
            "rank": self.rank, "cause": self.cause, "share": round(self.share, 4), "text": str(self),
            "excess": {name: round(value, 4) for name, value in self.excess.items()}}
        if self.slowest is not None:
            found["slowest_connection"] = {"from": self.slowest.sender, "to": self.slowest.receiver,
                                           "rate": round(self.slowest.rate)}
        if self.speedup > 1:
            found["speedup_of_shares"] = round(self.speedup, 4)
        if self.link is not None:
            found["link"] = {"ranks": list(self.link.ranks), "other_rate": round(self.link.usual)}
        return found


def diagnose(ledgers: Mapping[int, Ledger]) -> Slowness | None:
    """Return why a job is slow; None if nothing stands out.

    Args:
        ledgers: of at least two ranks, over about the same time.
    """
    used = {rank: ledger for rank, ledger in ledgers.items() if ledger.steps >= LEAST_STEPS and ledger.seconds > 0}
    if len(used) < 2:
        return None
    found = [each for each in (_late_rank(used), _link(used)) if each is not None]
    return max(found, key=lambda each: each.share) if found else _exchange(used)


def _late_rank(ledgers: Mapping[int, Ledger]) -> Slowness | None:
    """Return which rank the others wait for."""
    own = {rank: 1 - _waited(ledger) for rank, ledger in ledgers.items()}
    slow = max(own, key=lambda rank: own[rank])
    others = [rank for rank in ledgers if rank != slow]
    excess = own[slow] - statistics.median(own[rank] for rank in others)
    if excess < LEAST_EXCESS:
        return None
    crowd = statistics.median(ledgers[rank].queued / max(ledgers[rank].cpu, 1e-9) for rank in others)
    shares = {rank: _shares(ledger, crowd) for rank, ledger in ledgers.items()}
    more = {cause: share - statistics.median(shares[rank][cause] for rank in others)
            for cause, share in shares[slow].items()}
    cause = max(more, key=lambda each: more[each])
    if cause != "computing":
        return Slowness(slow, cause, excess, more)
    return None if excess < LEAST_COMPUTING else Slowness(slow, cause, excess, more, speedup=_speedup(list(own.values())))


def _speedup(own: list[float]) -> float:
    """Return how many times as fast steps are if all ranks compute equally long, from how much of each step they do now.

    A rank's speed is 1 / own while all have equal rows, so together they take the harmonic mean. What the slowest rank waits
    for stays.
    """
    return 1 / (1 - max(own) + statistics.harmonic_mean([max(each, 0.01) for each in own]))  # threads may wait at once


def _link(ledgers: Mapping[int, Ledger]) -> Slowness | None:
    """Return whose link they wait for."""
    link = slow_link(ledgers)
    share = 0.0 if link is None else min(link.share, _waits(ledgers))
    if link is None or share < LEAST_EXCESS:
        return None
    return Slowness(link.ranks[0], "link", share, {"link": share}, link.flow, link)


def _exchange(ledgers: Mapping[int, Ledger]) -> Slowness | None:
    """Return why all ranks wait, though none is late."""
    waits = _waits(ledgers)
    absent = {rank: ledger.absent / ledger.steps for rank, ledger in ledgers.items()}
    most = max(absent, key=lambda rank: absent[rank])
    if waits >= LEAST_EXCESS and absent[most] >= LEAST_ABSENT > min(absent.values()):
        return Slowness(most, "absent", waits, {"absent": absent[most] - min(absent.values())})
    if waits < LEAST_COMMUNICATION:
        return None
    return Slowness(-1, "communication", waits, {}, min(flows(ledgers), key=lambda flow: flow.rate, default=None))


def _waits(ledgers: Mapping[int, Ledger]) -> float:
    """Return the share of its time that every rank waits for collectives."""
    return min(map(_waited, ledgers.values()))


def _waited(ledger: Ledger) -> float:
    """Return the share of its time that a rank waits for collectives.

    A thread whose wait is over waits on if something else has its core. That time is counted twice, and is not the others'.
    """
    twice = max(0.0, ledger.blocked + ledger.queued + ledger.cpu - ledger.seconds)
    return max(0.0, ledger.blocked - min(twice, ledger.queued)) / ledger.seconds


def _shares(ledger: Ledger, crowd: float) -> dict[str, float]:
    """Return the share of time by cause, without waits for collectives; together about the rest.

    Args:
        crowd: seconds of waiting for a core for each second of running, of the other ranks: who runs longer waits longer.
    """
    off = ledger.seconds - ledger.cpu - ledger.queued - ledger.blocked - max(0.0, ledger.input - ledger.input_cpu)
    crowded = min(ledger.queued, crowd * ledger.cpu)
    computing = ledger.cpu - ledger.input_cpu - ledger.collecting + crowded
    seconds = {"input": ledger.input, "cpu": ledger.queued - crowded, "collection": ledger.collecting,
               "waiting": max(0.0, off), "computing": max(0.0, computing)}
    return {cause: value / ledger.seconds for cause, value in seconds.items()}


def flows(ledgers: Mapping[int, Ledger]) -> list[Flow]:
    """Return what ranks have sent each other between hosts, without the connections that carried little."""
    owners = {each.local: rank for rank, ledger in ledgers.items() for each in ledger.traffic}
    known = [(rank, each) for rank, ledger in ledgers.items() for each in ledger.traffic if each.remote in owners]
    least = LEAST_BYTES * max((each.sent for _, each in known), default=0)
    found: dict[tuple[int, int], list[Traffic]] = {}
    for rank, each in known:
        if each.sent > least and each.sending > 0:
            found.setdefault((rank, owners[each.remote]), []).append(each)
    flowing = []
    for (sender, receiver), carried in sorted(found.items()):
        sending = max(each.sending for each in carried)  # several send at the same time
        flowing.append(Flow(sender, receiver, min(1.0, sending / ledgers[sender].seconds),
                            sum(each.sent for each in carried) / sending))
    return flowing


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
