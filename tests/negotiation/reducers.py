"""Ranks that play rounds of a gradient set on a simulation, and what the answers must be."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

from hvdlite.core.types import Collective
from hvdlite.negotiation.controller import (
    CloseMailbox,
    EvictLayout,
    FreezeMailbox,
    Instruction,
    ParticipateWithoutData,
    SuspendLayout,
)
from hvdlite.negotiation.layouts import first_round
from hvdlite.negotiation.mailboxes import bucket_stem
from hvdlite.negotiation.messages import (
    Bucket,
    BucketReady,
    BucketRelease,
    ErrorKind,
    Layout,
    Mailbox,
    MailboxFrozen,
    MailboxStale,
    Request,
    Response,
    RoundDone,
)
from tests.negotiation.simulation import Simulation

LABEL = "set"
Answer = tuple[ErrorKind, tuple[int, ...]]
"""What became of a member: an error, or the ranks that contributed."""


@dataclasses.dataclass(frozen=True)
class Round:
    """What one rank brings to one round: its members' lengths, those without a gradient, those with a sparse one."""

    members: Mapping[str, int]
    missing: frozenset[str] = frozenset()
    sparse: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Call:
    """A bucket that a rank has written to a mailbox."""

    mailbox: Mailbox
    bucket: Bucket
    ready: BucketReady
    round: int  # of the mailbox


class Reducer:
    """One rank's half of a gradient set, as `training/gradients/reducer.py` plays it, on a bare controller.

    Args:
        rounds: what the rank brings.
        later: if it is to join after these: the rounds until the next join, and so on; it joins after the last ones too.
        rng: lets it finish a round again now and then, as after an interrupt.

    Attributes:
        played: its rounds by their numbers.
        answers: each round's answers by member, likewise.
        by_bucket: the numbers of the rounds that began with a layout, likewise.
        last: the numbers of the last rounds before a join, likewise.
        partly_unused: by round and member of a whole bucket: whether some ranks, not all, lack its gradient, as released.
    """

    def __init__(self, simulation: Simulation, rank: int, rounds: Sequence[Round], rng: random.Random, *,
                 process_set: int = 0, label: str = LABEL, later: Sequence[Sequence[Round]] = (),
                 joins: bool = False) -> None:
        self.simulation, self.rank, self.rng = simulation, rank, rng
        self.process_set, self.label = process_set, label
        self.controller = simulation.controllers[rank]
        self.epochs = [list(rounds), *map(list, later)]
        self.joins = joins or bool(later)
        self.joined = 0  # how often all ranks have
        self.joining = False
        self.number = 0
        self.played: dict[int, Round] = {}
        self.answers: dict[int, dict[str, Answer]] = {}
        self.by_bucket: set[int] = set()
        self.last: set[int] = set()
        self.partly_unused: dict[tuple[int, str], bool] = {}
        self.to_give: list[str] | None = None  # None: between rounds
        self.layout: Layout | None = None
        self.suspended: Layout | None = None
        self.current: Layout | None = None  # what the round goes by
        self.sparse: set[str] = set()  # members that go by themselves
        self.filled: dict[int, list[str]] = {}
        self.broken: set[int] = set()
        self.alone = False
        self.waiting: set[str] = set()
        self.last_written: dict[int, int] = {}  # the last rounds that it has written, by mailbox
        self.mailboxes: dict[str, Mailbox] = {}  # that it may write to, by stem
        self.call: Call | None = None
        self.impatience = 0.05  # how likely it is that it complains before all have written
        self.exchanged: set[int] = set()  # the numbers of the rounds with a bucket that went through a mailbox

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return not self.epochs and self.to_give is None and not self.joining

    def act(self) -> None:
        """Do one thing, if there is one to do."""
        if self.to_give is None:
            if self.joining or not self.epochs:
                return
            if self.epochs[0]:
                self._begin(self.epochs[0].pop(0))
                if self.joins and not self.epochs[0]:
                    self.last.add(self.number)
            elif self.joins:
                self.joining = True
                self.controller.enqueue(Request("join", Collective.JOIN, "uint8", (0,)))
            else:
                self.epochs.pop(0)
        elif self.to_give:
            self._give(self.to_give.pop())
        else:
            if self.call is not None:
                self._look(self.call)
            if self.call is not None:
                return  # rank 0 does not know what it has given
            if self.alone or self.rng.random() < 0.1:
                self._finish_round()
                self.alone = False
            if not self.waiting:
                self.to_give = None
                if self.rng.random() < 0.1:
                    self._finish_round()

    def follow(self, instruction: Instruction) -> None:
        """Do what a decision says."""
        match instruction:
            case Layout(label=self.label, first_round=first, unbucketed=alone):
                learned = {name for bucket in instruction.buckets for name in bucket.response.names}
                assert first == 1 or learned == self.played[first - 2].members.keys() - set(alone), (
                    "neither learned from a whole round nor carried over")
                self.layout = instruction
            case SuspendLayout(layout) if layout.label == self.label:
                assert self.layout == layout
                self.suspended, self.layout = layout, None
            case EvictLayout(layout) if layout.label == self.label:
                self.layout = None if self.layout == layout else self.layout  # it may be the next one
                self.suspended = None if self.suspended == layout else self.suspended
            case BucketRelease(bucket_id=bucket, globally_unused=unused) if bucket in self.definitions:
                response = self.definitions[bucket].response
                for index, name in enumerate(response.names):
                    self.partly_unused[self.number, name] = index in instruction.partly_unused
                    self._answered(name, (ErrorKind.NONE, () if index in unused else response.contributors))
            case Mailbox():
                self.mailboxes[instruction.stem] = instruction
            case FreezeMailbox(mailbox_id):
                self._freeze(mailbox_id)
            case CloseMailbox(mailbox_id):
                if self.call is not None and self.call.mailbox.mailbox_id == mailbox_id:
                    self._close(self.call)
            case Response(collective=Collective.JOIN):
                self._go_on()
            case Response(names=names, error=error, contributors=contributors, collective=collective):
                for name in names:
                    if collective is Collective.ALLGATHER and error is ErrorKind.NONE:
                        self.sparse.add(name)
                    if name in self.waiting:
                        self._answered(name, (error, contributors))

    def _go_on(self) -> None:
        self.joining = False
        self.joined += 1
        self.number = first_round(self.joined) - 1
        self.layout, self.suspended = self.layout or self.suspended, None
        self.epochs.pop(0)

    def _begin(self, now: Round) -> None:
        self.number += 1
        self.now = self.played[self.number] = now
        self.answers[self.number] = {}
        self.to_give = list(now.members)
        self.waiting = set(self.to_give)
        self.rng.shuffle(self.to_give)
        self.filled, self.broken = {}, set()
        self.definitions = {bucket.bucket_id: bucket for bucket in self.layout.buckets} if self.layout else {}
        self.current = self.layout if self.layout and self.layout.first_round <= self.number else None
        if self.current:
            self.sparse.update(self.current.unbucketed)
            self.home = {member.name: bucket for bucket in self.current.buckets for member in bucket.members}
            if self.home.keys() != now.members.keys() - self.sparse:
                self.controller.mark_stale(self.current.layout_id)
                self.current = None
            else:
                self.by_bucket.add(self.number)
        self.alone = self.current is None or bool(self.sparse)

    def _give(self, name: str) -> None:
        if self.current is None or name in self.sparse or self.home[name].bucket_id in self.broken:
            self._enqueue(name)
            return
        bucket = self.home[name]
        filled = self.filled.setdefault(bucket.bucket_id, [])
        member = next(member for member in bucket.members if member.name == name)
        if member.shape != (self.now.members[name],) or name in self.now.sparse:
            self.broken.add(bucket.bucket_id)
            self.controller.mark_stale(self.current.layout_id)
            for other in (*filled, name):
                self._enqueue(other)
            return
        filled.append(name)
        if len(filled) == len(bucket.members):
            missing = tuple(index for index, other in enumerate(bucket.members) if other.name in self.now.missing)
            full = sum(len(self.filled.get(each.bucket_id, ())) == len(each.members) for each in self.current.buckets)
            ends_round = full == len(self.current.buckets) and not self.sparse
            ready = BucketReady(bucket_id=bucket.bucket_id, round_id=self.number, unused=missing, ends_round=ends_round,
                                blocking=ends_round and len(self.current.buckets) == 1)
            mailbox = self.mailboxes.get(bucket_stem(bucket.bucket_id)) if ready.blocking else None
            if mailbox is not None and self.rng.random() < 0.98:  # else a signal handler has its lock
                last = self.last_written.get(mailbox.mailbox_id, mailbox.first_round - 1)
                self.call = Call(mailbox, bucket, ready, last + 1)
                self.last_written[mailbox.mailbox_id] = last + 1
                self._round_of(self.call)[self.rank] = str(missing)
            else:
                self.controller.enqueue_bucket(bucket, ready)

    def _round_of(self, call: Call) -> dict[int, str]:
        return self.simulation.written[call.mailbox.mailbox_id, call.round]

    def _is_complete(self, call: Call) -> bool:
        written = self._round_of(call)
        return written.keys() == set(call.bucket.response.contributors) and len(set(written.values())) == 1

    def _look(self, call: Call) -> None:
        """Go on in a mailbox, if all ranks have written the same there; or lose patience."""
        if self._is_complete(call):
            self._exchanged(call)
        elif len(set(self._round_of(call).values())) > 1 or self.rng.random() < self.impatience:
            self.controller.report_mailbox(MailboxStale(call.mailbox.mailbox_id, call.bucket.response.names[0]))

    def _exchanged(self, call: Call) -> None:
        self.call = None
        self.exchanged.add(self.number)
        for index, name in enumerate(call.bucket.response.names):
            self.partly_unused[self.number, name] = False
            self._answered(name, (ErrorKind.NONE, () if index in call.ready.unused else call.bucket.response.contributors))

    def _freeze(self, mailbox_id: int) -> None:
        for stem, mailbox in list(self.mailboxes.items()):
            if mailbox.mailbox_id == mailbox_id:
                del self.mailboxes[stem]
                last = self.last_written.get(mailbox_id, mailbox.first_round - 1)
                self.controller.report_mailbox(MailboxFrozen(mailbox_id, last))

    def _close(self, call: Call) -> None:
        if self._is_complete(call):
            self._exchanged(call)
        else:
            self.call = None
            self.controller.enqueue_bucket(call.bucket, call.ready)

    def _enqueue(self, name: str) -> None:
        self.alone = True
        length = self.now.members[name]
        if name in self.now.sparse:
            request = Request(name, Collective.ALLGATHER, "uint8", (self.rank, length), label=self.label,
                              round_id=self.number, process_set_id=self.process_set)
        else:
            request = Request(name, Collective.ALLREDUCE, "uint8", (length,), absent=name in self.now.missing,
                              label=self.label, round_id=self.number, process_set_id=self.process_set)
        self.controller.enqueue(request)

    def _finish_round(self) -> None:
        self.controller.round_done(RoundDone(self.label, self.number, self.process_set))

    def _answered(self, name: str, answer: Answer) -> None:
        self.waiting.remove(name)
        assert name not in self.answers[self.number], "answered twice"
        self.answers[self.number][name] = answer


INQUIRE, TUNE = 6, 7
ACTIONS = 8


def run(simulation: Simulation, reducers: list[Reducer], schedule: list[int]) -> None:
    """Interleave as the schedule says, then in turn until everything is over."""
    size = simulation.size

    def do(rank: int, action: int) -> None:
        if action in (0, 1):
            reducers[rank].act()
        elif action == 2:
            simulation.say(rank)
        elif action == 3:
            simulation.hear(rank)
        elif action == 4:
            simulation.decide()
        elif action == INQUIRE:
            simulation.coordinator.order(status_requests=[rank])
        elif action == TUNE:
            simulation.coordinator.tune({"bucket_size": 30 + 10 * rank}, simulation.now)
        else:
            for instruction in simulation.apply(rank):
                reducers[rank].follow(instruction)

    for choice in schedule:
        do(choice % size, choice // size)
    for _ in range(5000):
        if all(reducer.over for reducer in reducers):
            return
        for rank in range(size):
            for action in range(INQUIRE):
                do(rank, action)
    raise AssertionError(f"something waits for ever: {[(reducer.number, reducer.waiting) for reducer in reducers]}")


def check(simulation: Simulation, reducers: Sequence[Reducer]) -> None:
    """Fail unless every member of every round was answered once, alike on all ranks that played it, and rightly."""
    assert simulation.failures == [None] * simulation.size
    for number in set().union(*(reducer.played for reducer in reducers)):
        here = {reducer.rank: reducer.played[number] for reducer in reducers if number in reducer.played}
        for reducer in reducers:
            if number not in reducer.played:
                continue
            answers = reducer.answers[number]
            assert answers.keys() == reducer.played[number].members.keys()
            for name, (error, contributors) in answers.items():
                wanted, present = expected(here, name)
                if error is not wanted:  # a rank that lacks it may have joined before others reported it
                    wanted, present = expected({rank: each for rank, each in here.items() if name in each.members
                                                or number not in reducers[rank].last}, name)
                assert error is wanted, (number, name)
                if error is ErrorKind.NONE:  # a bucket's place holds the identity where a member is missing
                    assert bool(contributors) == bool(present) and present <= set(contributors)
                    partly = reducer.partly_unused.get((number, name))
                    assert partly is None or partly == (0 < len(present) < len(contributors))
                    assert all(other.answers[number][name][1] == contributors for other in reducers
                               if name in other.answers.get(number, ()))
    done = [[told for told in map(_done, plan) if told is not None] for plan in simulation.plans]
    for mine in done:
        for theirs in done:
            assert [each for each in mine if each in theirs] == [each for each in theirs if each in mine], "different orders"


def _done(instruction: Instruction) -> object:
    """Return what identifies an instruction that moves bytes, on every rank alike; None for others."""
    match instruction:
        case BucketRelease(bucket_id=bucket):
            return "bucket", bucket, instruction.globally_unused, instruction.partly_unused
        case Response(error=ErrorKind.NONE) | ParticipateWithoutData(Response()):
            response = instruction.response if isinstance(instruction, ParticipateWithoutData) else instruction
            return response.names, response.round_id
    return None


def expected(here: Mapping[int, Round], name: str) -> tuple[ErrorKind, set[int]]:
    """Return the answer that a member must get, and whose gradients it must hold.

    Args:
        here: what the ranks bring that take part in the round.
    """
    present = {rank for rank, each in here.items() if name not in each.missing}
    sparse = {rank for rank in present if name in here[rank].sparse}
    kinds = {(each.members[name], rank in sparse) for rank, each in here.items()
             if name in each.members and not (sparse and rank not in present)}
    if any(name not in each.members for each in here.values()) or len(kinds) > 1:
        return ErrorKind.MISMATCH, set()
    return ErrorKind.NONE, present


def steady(size: int, members: dict[str, int], count: int, **options: object) -> tuple[Simulation, list[Reducer]]:
    """Play so many equal rounds."""
    simulation = Simulation(size, **options)  # type: ignore[arg-type]
    reducers = [Reducer(simulation, rank, [Round(members)] * count, random.Random(rank)) for rank in range(size)]
    run(simulation, reducers, [])
    return simulation, reducers
