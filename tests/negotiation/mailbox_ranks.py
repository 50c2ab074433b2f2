"""Ranks of the model of mailboxes: real coordinator, controllers and mailboxes; no processes, and no threads.

A rank's script is a list of calls. A test moves ranks and messages in any order.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from hvdlite.core.types import Collective
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.stall_report import CallHistory
from hvdlite.engine.mailboxes import Mailboxes
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.exchange import MailboxCall, Signature
from hvdlite.handoff.handle import BlockedWaiters
from hvdlite.handoff.handoff import Handoff
from hvdlite.handoff.inbox import Task
from hvdlite.handoff.job_state import JobState
from hvdlite.handoff.mailbox import MailboxEnd
from hvdlite.negotiation.controller import CloseMailbox, Controller, FreezeMailbox
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.mailboxes import stem_and_number
from hvdlite.negotiation.messages import Decision, ErrorKind, Mailbox, MailboxStale, Report, Request, Response
from hvdlite.negotiation.negotiator import Policy
from hvdlite.planes.arithmetic import Casts

_WAITERS = BlockedWaiters(lambda: None, lambda _: None)


@dataclasses.dataclass
class Call:
    """A call of a rank's script.

    Attributes:
        number: of the call under its name; ranks' calls with the same one belong together.
        blocking: else an ordinary request.
        elements: of the tensor.
        abandoned: whether its thread is interrupted while it waits.
        result: None before it is known; an error is -1.
    """

    name: str
    number: int
    blocking: bool
    elements: int = 1
    abandoned: bool = False
    result: int | None = None


class Job:
    """The ranks, their messages and their memory.

    Args:
        scripts: of each rank.
    """

    def __init__(self, scripts: Sequence[list[Call]], choice: random.Random) -> None:
        self.size, self.choice = len(scripts), choice
        self.coordinator = Coordinator(self.size, Policy(mailbox_limit=1 << 10), _summed)
        self.areas: list[bytearray] = []
        self.ranks = [Rank(self, rank, script) for rank, script in enumerate(scripts)]
        self.exchanged = 0  # calls that needed no request

    def range(self, number: int, nbytes: int) -> Any:
        """Return the memory of an area; now and then, a rank has no pages for it."""
        if number == len(self.areas):
            self.areas.append(bytearray(nbytes))
        return SimpleNamespace(bytes=self.areas[number], allocate=self._allocate)

    def _allocate(self, begin: int, nbytes: int) -> None:
        if self.choice.random() < 0.02:
            raise MemoryError

    def decide(self) -> None:
        """Send the next decision, if there is one."""
        decision = self.coordinator.decide()
        if decision is not None:
            for rank in self.ranks:
                rank.inbox.append(msgspec.msgpack.decode(msgspec.msgpack.encode(decision), type=Decision))
        self.coordinator.negotiator.check_invariants()

    def play(self, most: int = 200_000) -> None:
        """Let things happen in random order until all scripts are over; fail if they never are."""
        actions: list[Callable[[], None]] = [self.decide]
        for rank in self.ranks:
            actions += [rank.step, rank.step, rank.step, rank.send, rank.receive, rank.apply]
        laggard = self.choice.choice([None, *self.ranks])  # applies decisions late
        for _ in range(most):
            action = self.choice.choice(actions)
            if laggard is None or action != laggard.apply or self.choice.random() < 0.03:
                action()
            if self.choice.random() < 0.01:
                self.choice.choice(self.ranks).lose_patience()
            if all(rank.is_over for rank in self.ranks):
                return
        raise AssertionError("the ranks hang: " + "; ".join(str(rank.current) for rank in self.ranks))


class Inbox:
    """The inbox of a rank whose background thread does at once what it is to do."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def post(self, item: Entry | MailboxStale | Task) -> None:
        match item:
            case Entry():
                self._rank.enqueue(item)
            case MailboxStale():
                self._rank.mailboxes.stale(item)
            case Task():
                item.run()

    def release(self, key: tuple[int, str]) -> None:
        self._rank.finished(key[1])


class Rank:
    """A rank: its script's thread and its background thread."""

    def __init__(self, job: Job, rank: int, script: list[Call]) -> None:
        self.job, self.rank, self.script = job, rank, script
        self.controller = Controller(rank)
        self.outbox: deque[Report] = deque()
        self.inbox: deque[Decision] = deque()
        made, inbox = iter(range(1 << 30)), Inbox(self)
        self.handoff = Handoff(inbox, _WAITERS, JobState(job.size))  # type: ignore[arg-type]
        self.mailboxes = Mailboxes(lambda nbytes: job.range(next(made), nbytes), self.handoff, self.controller,
                                   FlightRecorder("shm", lambda: 0.0), CallHistory(), casts=Casts.of_numpy())
        self.entries: dict[str, tuple[Call, Entry]] = {}
        self.in_use: set[str] = set()
        self.position = 0
        self.current: tuple[Call, Any, MailboxCall | None] | None = None
        self._begun: MailboxCall | None = None  # about to be written
        self._exchanges: dict[str, tuple[Call, MailboxCall]] = {}  # that have gone to a mailbox, by name

    @property
    def is_over(self) -> bool:
        """Whether the script is over, and nothing of it is under way."""
        return self.position == len(self.script) and self.current is None and not self.in_use

    def step(self) -> None:
        """Let the script's thread go on, as far as it can."""
        if self.current is not None:
            self._look()
        elif self.position < len(self.script) and self.script[self.position].name not in self.in_use:
            self._call(self.script[self.position])
            self.position += 1

    def _call(self, call: Call) -> None:
        value = np.full(call.elements, _value(call, self.rank), np.int64)
        output = np.zeros_like(value)

        def entry() -> Entry:
            request = Request(call.name, Collective.ALLREDUCE, "int64", (call.elements,), payload=value.tobytes(),
                              blocking=call.blocking)
            made = Entry(request, [value], [output], output, _WAITERS)
            self.entries[call.name] = call, made
            return made

        self.in_use.add(call.name)
        end = self.handoff.mailboxes.get((0, stem_and_number(call.name)[0])) if call.blocking else None
        self.current = call, end, None
        if end is None:
            self.enqueue(entry())
        else:
            stem, number = stem_and_number(call.name)
            signature = Signature(stem, Collective.ALLREDUCE, "int64", (call.elements,))
            self._begun = MailboxCall((0, call.name), signature, number, value, output, entry)

    def _write(self, call: Call, end: MailboxEnd, made: MailboxCall) -> None:
        self._begun = None
        self._exchanges[call.name] = call, made
        if end.write(made):
            self.current = call, end, made
        else:
            self.enqueue(made.make_entry())

    def _look(self) -> None:
        assert self.current is not None
        call, end, made = self.current
        if self._begun is not None:
            self._write(call, end, self._begun)
            return
        if made is not None and not made.is_done and made.entry is None and end.is_complete(made):
            end.finish(made)
        if call.result is not None:
            self.current = None
        elif call.abandoned and self.job.choice.random() < 0.1:
            if made is not None:
                end.abandon(made)
            self.current = None

    def lose_patience(self) -> None:
        """Let a thread that waits in a mailbox tell the coordinator."""
        if self.current is not None:
            _, end, made = self.current
            if made is not None and not made.is_done and made.entry is None:
                self.mailboxes.stale(MailboxStale(end.mailbox.mailbox_id, made.key[1]))

    def finished(self, name: str) -> None:
        """A call in a mailbox is over."""
        self.in_use.discard(name)
        call, made = self._exchanges[name]
        assert made.is_done
        call.result = int(made.output[0])
        self.job.exchanged += 1

    def enqueue(self, entry: Entry) -> None:
        """Report a call."""
        self.controller.enqueue(entry.request)

    def send(self) -> None:
        """Send a report."""
        report = self.controller.report()
        if report is not None:
            self.outbox.append(msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=Report))

    def receive(self) -> None:
        """Let the coordinator receive a report."""
        if self.outbox:
            self.job.coordinator.receive(self.rank, self.outbox.popleft(), 0.0)

    def apply(self) -> None:
        """Apply a decision."""
        if not self.inbox:
            return
        for instruction in self.controller.apply(self.inbox.popleft()):
            match instruction:
                case Mailbox():
                    self.mailboxes.open(instruction)
                case FreezeMailbox(mailbox_id):
                    self.mailboxes.freeze(mailbox_id)
                case CloseMailbox(mailbox_id):
                    self.mailboxes.close(mailbox_id)
                case Response(names=(name,)):
                    call, _ = self.entries.pop(name)
                    self.in_use.discard(name)
                    call.result = -1 if instruction.error is not ErrorKind.NONE else int(
                        np.frombuffer(instruction.result or b"", np.int64)[0])
                case _:
                    raise AssertionError(instruction)


def _value(call: Call, rank: int) -> int:
    """Return what a rank contributes to a call; sums of different calls differ."""
    return (call.number + 1) * 1000 + rank


def expected(call: Call, size: int) -> int:
    """Return the result of a call that all ranks make alike."""
    return sum(_value(call, rank) for rank in range(size))


def _summed(response: Response, payloads: Sequence[bytes], size: int) -> bytes:
    del response, size
    total: bytes = sum(np.frombuffer(payload, np.int64) for payload in payloads).tobytes()  # type: ignore[union-attr]
    return total
