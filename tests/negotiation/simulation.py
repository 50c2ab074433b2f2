"""Negotiation without ranks: controllers and a coordinator, with explicit, in-order, arbitrarily slow links."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from hvdlite.negotiation.controller import Controller, Instruction
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.layouts import BucketSizes
from hvdlite.negotiation.leader import Leader
from hvdlite.negotiation.messages import Decision, DirectMessage, FailureNotice, HostReport, Report, Response
from hvdlite.negotiation.negotiator import Policy

_encode = msgspec.msgpack.encode


class Follower(Protocol):
    """Does what decisions say."""

    def follow(self, instruction: Instruction) -> None: ...


def concatenated(response: Response, payloads: Sequence[bytes], size: int) -> bytes:
    """Stand in for the reduction of the eager lane: shows who contributed what, in which order."""
    return b"+".join(payloads)


class Simulation:
    """A world whose messages a test moves one by one.

    Args:
        hosts: the ranks of each host that has a leader; the others speak for themselves.
        mailboxes: whether ranks exchange buckets in mailboxes; only without hosts.

    Attributes:
        written: what ranks have written to mailboxes.
    """

    def __init__(self, size: int, threshold: int = 1 << 20, *, sizes: BucketSizes | None = None,
                 layouts: int = 64, hosts: Sequence[Sequence[int]] = (), mailboxes: bool = False) -> None:
        self.size = size
        self.leaders = [Leader(ranks, size) for ranks in hosts]
        self.leader_of = {rank: leader for leader in self.leaders for rank in leader.ranks}
        self.host_up: list[deque[HostReport]] = [deque() for _ in hosts]
        self.host_down: list[deque[Decision]] = [deque() for _ in hosts]
        policy = Policy(threshold, sizes or BucketSizes(16, 64), layouts, mailbox_limit=int(mailboxes))
        self.coordinator = Coordinator(size, policy, concatenated)
        self.written: defaultdict[tuple[int, int], dict[int, str]] = defaultdict(dict)  # by mailbox and round, then rank
        self.controllers = [Controller(rank) for rank in range(size)]
        self.up: list[deque[Report]] = [deque() for _ in range(size)]
        self.down: list[deque[Decision]] = [deque() for _ in range(size)]
        self.messages: list[list[DirectMessage]] = [[] for _ in range(size)]
        self.plans: list[list[Instruction]] = [[] for _ in range(size)]
        self.failures: list[FailureNotice | None] = [None] * size
        self.now = 0.0

    def say(self, rank: int) -> None:
        report = self.controllers[rank].report()
        if report is None:
            return
        report = msgspec.msgpack.decode(_encode(report), type=Report)
        if rank in self.leader_of:
            self.leader_of[rank].receive(rank, report)
            self._lead(self.leader_of[rank])
        else:
            self.up[rank].append(report)

    def _lead(self, leader: Leader) -> None:
        leader.check_invariants()
        merged = leader.take_report()
        if merged is not None:
            self.host_up[self.leaders.index(leader)].append(msgspec.msgpack.decode(_encode(merged), type=HostReport))

    def hear(self, rank: int) -> bool:
        """Let the coordinator receive a report of `rank` or its leader, without deciding yet; return whether it did."""
        if rank in self.leader_of:
            leader = self.leader_of[rank]
            queue = self.host_up[self.leaders.index(leader)]
            if queue:
                self.coordinator.receive_host(leader.ranks, queue.popleft(), self.now)
                self.coordinator.negotiator.check_invariants()
                return True
        elif self.up[rank]:
            self.coordinator.receive(rank, self.up[rank].popleft(), self.now)
            self.coordinator.negotiator.check_invariants()
            return True
        return False

    def decide(self) -> None:
        had_news = self.coordinator.has_news
        decision = self.coordinator.decide()
        messages = self.coordinator.take_direct_messages()
        assert had_news or not (decision or messages), "the engine would not have asked for this decision"
        assert not self.coordinator.has_news
        for message in messages:
            self.messages[message.rank].append(msgspec.msgpack.decode(_encode(message), type=DirectMessage))
        if decision is not None:
            decision = msgspec.msgpack.decode(_encode(decision), type=Decision)
            alone = [queue for rank, queue in enumerate(self.down) if rank not in self.leader_of]
            for queue in self.host_down + alone:
                queue.append(decision)

    def apply(self, rank: int) -> list[Instruction]:
        """Let a rank apply one decision; return what it is told to do."""
        if rank in self.leader_of and not self.down[rank]:
            leader = self.leader_of[rank]
            queue = self.host_down[self.leaders.index(leader)]
            if queue:
                leader.observe(queue[0])
                self._lead(leader)
                for other in leader.ranks:
                    self.down[other].append(queue[0])
                queue.popleft()
        if not self.down[rank]:
            return []
        decision = self.down[rank].popleft()
        self.failures[rank] = self.failures[rank] or decision.failure
        instructions = self.controllers[rank].apply(decision)
        self.plans[rank] += instructions
        return instructions

    def settle(self, reducers: Sequence[Follower] = ()) -> None:
        """Deliver everything that is under way; tell reducers, by rank, what their ranks are to do."""
        for _ in range(3):
            for rank in range(self.size):
                self.say(rank)
                while self.hear(rank):
                    pass
            self.decide()
            for rank in range(self.size):
                while self.down[rank] or (rank in self.leader_of
                                          and self.host_down[self.leaders.index(self.leader_of[rank])]):
                    for instruction in self.apply(rank):
                        if reducers:
                            reducers[rank].follow(instruction)
