"""Negotiation without ranks: controllers and a coordinator, with explicit, in-order, arbitrarily slow links."""

from __future__ import annotations

from collections import deque

import msgspec

from hvdlite.negotiation.buckets import BucketSizes
from hvdlite.negotiation.controller import Controller, Instruction
from hvdlite.negotiation.coordinator import Coordinator, Policy
from hvdlite.negotiation.messages import Decision, FailureNotice, Report, Response

_encode = msgspec.msgpack.encode


def concatenated(response: Response, payloads: list[bytes]) -> bytes:
    """Stand in for the reduction of the eager lane: shows who contributed what, in which order."""
    return b"+".join(payloads)


class Simulation:
    """A world whose messages a test moves one by one."""

    def __init__(self, size: int, threshold: int = 1 << 20, *, sizes: BucketSizes | None = None,
                 layouts: int = 64) -> None:
        self.size = size
        self.coordinator = Coordinator(size, Policy(threshold, sizes or BucketSizes(16, 64), layouts), concatenated)
        self.controllers = [Controller(rank) for rank in range(size)]
        self.up: list[deque[Report]] = [deque() for _ in range(size)]
        self.down: list[deque[Decision]] = [deque() for _ in range(size)]
        self.plans: list[list[Instruction]] = [[] for _ in range(size)]
        self.failures: list[FailureNotice | None] = [None] * size
        self.now = 0.0

    def say(self, rank: int) -> None:
        report = self.controllers[rank].report()
        if report is not None:
            self.up[rank].append(msgspec.msgpack.decode(_encode(report), type=Report))

    def hear(self, rank: int) -> None:
        """Let the coordinator receive one report of `rank`, without deciding yet."""
        if self.up[rank]:
            self.coordinator.receive(rank, self.up[rank].popleft(), self.now)
            self.coordinator.check_invariants()

    def decide(self) -> None:
        decision = self.coordinator.decide()
        if decision is not None:
            decision = msgspec.msgpack.decode(_encode(decision), type=Decision)
            for queue in self.down:
                queue.append(decision)

    def apply(self, rank: int) -> list[Instruction]:
        """Let a rank apply one decision; return what it is told to do."""
        if not self.down[rank]:
            return []
        decision = self.down[rank].popleft()
        self.failures[rank] = self.failures[rank] or decision.failure
        instructions = self.controllers[rank].apply(decision)
        self.plans[rank] += instructions
        return instructions

    def settle(self) -> None:
        """Deliver everything that is under way."""
        for _ in range(3):
            for rank in range(self.size):
                self.say(rank)
                while self.up[rank]:
                    self.hear(rank)
            self.decide()
            for rank in range(self.size):
                while self.down[rank]:
                    self.apply(rank)
