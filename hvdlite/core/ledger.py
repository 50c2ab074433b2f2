"""The ledger of a rank: for what the thread that trains has used its time, and what it has sent to other hosts."""

from __future__ import annotations

from typing import Any, Final

import msgspec

MOST_CONNECTIONS: Final = 16
"""Connections in a ledger; those that carried most."""


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """The kernel's figures of one TCP connection between hosts, at one of its ends.

    Attributes:
        local: the address and port of this end; likewise `remote`. What is `local` here is `remote` in the other end's rank.
        sent: bytes that the other end has acknowledged.
        received: bytes.
        sending: seconds in which sent bytes were not yet acknowledged, without those in which the other end had no room;
            counted in ticks of the kernel, some milliseconds, so right on average only.
    """

    local: str
    remote: str
    sent: int
    received: int
    sending: float

    def since(self, earlier: Traffic) -> Traffic:
        """Return what has been added."""
        if earlier.sent > self.sent or earlier.received > self.received:
            return self  # another connection, between the same ports
        return Traffic(self.local, self.remote, self.sent - earlier.sent, self.received - earlier.received,
                       max(0.0, self.sending - earlier.sending))


class Ledger(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of the thread that trains, over some steps; a part may overlap with `cpu`.

    Attributes:
        seconds: in all.
        steps: of the optimizer, or as the script counts them.
        blocked: waiting for collectives.
        cpu: running.
        queued: able to run, while something else ran on its core.
        collecting: in Python's garbage collection.
        input: waiting for batches, as far as the frontend can measure it.
        input_cpu: of those, running.
        absent: gradients that this rank did not have in a step, counted by step.
        forward: in modules, without waits for collectives; like the following only under `hvdrun --profile`, with torch.
        backward: from there to the optimizer's step, without waits.
        optimizer: in the optimizer's step, without waits.
        traffic: of the process's connections with other hosts, at most `MOST_CONNECTIONS`; on Linux, with several hosts.
    """

    seconds: float = 0.0
    steps: int = 0
    blocked: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0
    collecting: float = 0.0
    input: float = 0.0
    input_cpu: float = 0.0
    absent: int = 0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    traffic: tuple[Traffic, ...] = ()

    @property
    def numbers(self) -> tuple[Any, ...]:
        """All but the traffic, in order."""
        return msgspec.structs.astuple(self)[:-1]

    def since(self, earlier: Ledger) -> Ledger:
        """Return what has been added."""
        before = {(each.local, each.remote): each for each in earlier.traffic}
        traffic = [each.since(before[each.local, each.remote]) if (each.local, each.remote) in before else each
                 for each in self.traffic if (each.local, each.remote) in before or len(before) < MOST_CONNECTIONS]
        numbers = (now - then for now, then in zip(self.numbers, earlier.numbers, strict=True))
        return msgspec.structs.replace(Ledger(*numbers), traffic=tuple(traffic))
