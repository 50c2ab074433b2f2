"""A model of locked rounds: the real coordinator, controllers and locks, random schedules, and GPUs that only keep order.

Each rank has a stream, on which everything is launched. At any moment the streams must not wait for each other in a circle,
and in the end all of them must come to their ends: then no rank has launched anything in another order than the others.
What ranks bring to a launch (which round, which step) must be the same on all of them.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hvdlite.core.device import CPU, CUDA
from hvdlite.core.types import Collective
from hvdlite.engine.mailboxes import Mailboxes
from hvdlite.handoff.job_state import JobState
from hvdlite.handoff.locked_rounds import LockedRounds
from hvdlite.memory.mailbox_area import MailboxArea, area_bytes
from hvdlite.negotiation import locks, mailboxes
from hvdlite.negotiation.controller import (
    CloseMailbox,
    Controller,
    EvictLayout,
    FreezeMailbox,
    Instruction,
    ParticipateWithoutData,
    SplitBucket,
)
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.layouts import BucketSizes
from hvdlite.negotiation.messages import (
    Bucket,
    BucketReady,
    BucketRelease,
    ErrorKind,
    Layout,
    Mailbox,
    Request,
    Response,
    RoundDone,
)
from hvdlite.negotiation.negotiator import Policy
from tests.negotiation.reducers import Reducer, Round, check
from tests.negotiation.simulation import Simulation, concatenated

Launched = tuple[tuple[int, ...], object]
"""The ranks that have to launch it, and what it is."""
NAMES = ("a", "b", "c", "d", "e")
CALM_AFTER = 6000
"""After so many turns nothing but the scripts themselves and threads that are blocked for long changes anything."""


class LockingController(Controller):
    """Lets full buckets go to the rank's lock, if that takes them, as `GradientSets.enqueue_bucket` does."""

    def __init__(self, rank: int, owner: LockedRank) -> None:
        super().__init__(rank)
        self._owner = owner

    def enqueue(self, request: Request) -> None:
        if request.collective is Collective.ALLREDUCE and not request.name.startswith("cpu"):
            request = msgspec.structs.replace(request, device=CUDA)
        super().enqueue(request)

    def enqueue_bucket(self, bucket: Bucket, ready: BucketReady) -> SplitBucket | None:
        entry = entry_of(bucket, ready)
        lock = self._owner.state.locks.get(bucket.members[0].label)
        if (lock is not None and lock.put(entry)) or self._owner.mailboxes.keep(entry):
            return None
        return self.report_bucket(entry)

    def round_done(self, message: RoundDone) -> None:
        if not self._owner.mailboxes.keep(message):
            super().round_done(message)

    def report_bucket(self, entry: Any) -> SplitBucket | None:
        self._owner.ready[entry.ready.bucket_id] = entry.ready
        return super().enqueue_bucket(entry.bucket.definition, entry.ready)


def entry_of(bucket: Bucket, ready: BucketReady) -> Any:
    """Stand in for a `BucketEntry`."""
    return types.SimpleNamespace(ready=ready, bucket=types.SimpleNamespace(definition=bucket),
                                 handle=types.SimpleNamespace(name=bucket.response.names[0]), abandon=lambda error: None)


class LockedRank:
    """A rank's background thread, and its stream.

    Attributes:
        ready: what this rank has reported of buckets, by bucket.
        stream: what it has launched.
        reducers: its gradient sets.
        by_lock: how many buckets it has launched by locks.
    """

    def __init__(self, simulation: LockedSimulation, rank: int) -> None:
        self.simulation, self.rank = simulation, rank
        self.state: Any = JobState(simulation.size)
        self.ready: dict[int, BucketReady] = {}
        self.stream: list[Launched] = []
        self.reducers: list[Reducer] = []
        self.by_lock = 0
        self.controller = LockingController(rank, self)
        self.mailboxes = Mailboxes(rank, self._area, self.state, self.controller.report_mailbox,
                                   lambda stale: self.mailboxes.stale(stale), lambda call: None, lambda act: act(),
                                   self._take, self._launch_announced)

    def _area(self, capacity: int, ranks: Sequence[int]) -> MailboxArea | None:
        areas, mine = self.simulation.areas, len(self.mailboxes._areas) - 1
        while len(areas) <= mine:
            areas.append(bytearray(area_bytes(capacity, len(ranks))))
        return MailboxArea(areas[mine], list(ranks).index(self.rank), len(ranks), capacity) if self.rank in ranks else None

    def leave(self) -> None:
        """The script is over; what is decided is still done."""
        self.controller.leave()
        error: Any = None
        self.mailboxes.leave(error)

    def hurry(self) -> None:
        """A thread has been blocked for long."""
        waiters: Any = None
        self.mailboxes.hurry(waiters)

    def _take(self, item: Any) -> None:
        if isinstance(item, RoundDone):
            self.controller.round_done(item)  # the lock is gone
        else:
            self.controller.report_bucket(item)

    def _launch_announced(self, entry: Any) -> None:
        self.by_lock += 1
        self._launch_bucket(entry.bucket.definition, entry.ready)
        release = BucketRelease(bucket_id=entry.ready.bucket_id)
        for reducer in self.reducers:
            reducer.follow(release)

    def _launch_bucket(self, bucket: Bucket, ready: BucketReady) -> None:
        self.stream.append((bucket.response.contributors, (bucket.bucket_id, ready.round_id, ready.step)))

    def carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Layout():
                self.state.layouts[instruction.label] = types.SimpleNamespace(layout=instruction)
            case EvictLayout(layout):
                found = self.state.layouts.get(layout.label)
                if found is not None and found.layout == layout:
                    del self.state.layouts[layout.label]
            case Mailbox():
                self.mailboxes.open(instruction)
            case FreezeMailbox(mailbox_id):
                self.mailboxes.freeze(mailbox_id)
            case CloseMailbox(mailbox_id):
                self.mailboxes.close_lock(mailbox_id, self._launch_announced)
            case BucketRelease(bucket_id=bucket_id):
                ready = self.ready.pop(bucket_id)
                bucket = next(each for found in self.state.layouts.values() for each in found.layout.buckets
                              if each.bucket_id == bucket_id)
                self._launch_bucket(bucket, ready)
            case ParticipateWithoutData(response):
                self._perform(response)
            case Response(error=ErrorKind.NONE):
                self._perform(instruction)

    def _perform(self, response: Response) -> None:
        members = self.state.process_sets[response.process_set_id]
        if response.collective is Collective.ADD_PROCESS_SET:
            self.state.process_sets.add(response.members)
        elif response.device != CPU and self.rank in members and response.contributors:
            self.stream.append((members, (response.names, response.round_id)))


class LockedSimulation(Simulation):
    """A simulation whose coordinator opens locks."""

    def __init__(self, size: int, threshold: int = 1 << 20, layouts: int = 64) -> None:
        super().__init__(size, threshold, layouts=layouts)
        policy = Policy(threshold, BucketSizes(16, 64), layouts, locked_rounds=True)
        self.coordinator = Coordinator(size, policy, concatenated)
        self.areas: list[bytearray] = []
        self.ranks = [LockedRank(self, rank) for rank in range(size)]
        self.controllers = [rank.controller for rank in self.ranks]

    def apply(self, rank: int) -> list[Instruction]:
        instructions = super().apply(rank)
        for instruction in instructions:
            self.ranks[rank].carry_out(instruction)
            for reducer in self.ranks[rank].reducers:
                reducer.follow(instruction)
        return instructions

    def look(self, rank: int) -> None:
        """Let a rank's launcher look, and a user thread that has just announced a bucket."""
        for lock in list(self.ranks[rank].mailboxes._locks.values()):
            lock.look()

    def check_order(self, *, is_over: bool) -> None:
        """Let the GPUs do what is launched; fail if they wait for each other in a circle, or their work differs."""
        at = [0] * self.size
        heads: list[Launched | None] = []
        while True:
            heads = [rank.stream[place] if place < len(rank.stream) else None
                     for rank, place in zip(self.ranks, at, strict=True)]
            met = next((head for head in heads if head is not None and all(heads[rank] == head for rank in head[0])), None)
            if met is None:
                break
            for rank in met[0]:
                at[rank] += 1
        waits = {rank: {other for other in head[0] if heads[other] != head}
                 for rank, head in enumerate(heads) if head is not None}
        free = {rank for rank, head in enumerate(heads) if head is None}  # they may still launch what others wait for
        while more := {rank for rank, others in waits.items() if rank not in free and others & free}:
            free |= more
        assert len(free) == self.size, f"ranks launch in different orders: {heads}"
        assert not is_over or heads == [None] * self.size, f"GPUs wait for ever: {heads}"


def let_locks_open_soon(patch: Callable[[object, str, object], None]) -> None:
    """Adapt the product to the model: locks open after a plain round, and launchers look when it is their turn."""
    patch(LockedRounds, "start", lambda self, name, begin: None)
    patch(locks, "OPENS_AFTER", 1)
    patch(mailboxes, "SOON", 0)


class Play:
    """A job with random scripts and a random schedule.

    Attributes:
        locked: how many buckets were launched by locks, on all ranks.
        is_broken: whether a rank has died.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.randint(2, 4)
        self.simulation = LockedSimulation(self.size, rng.choice([0, 16, 1 << 20]), rng.choice([1, 64, 64]))
        self.blocked: list[str | None] = [None] * self.size
        self.is_broken = False
        self.dead: set[int] = set()
        sets = self._add_set() if self.size > 2 and rng.random() < 0.4 else ()
        joins = rng.random() < 0.3
        epochs = [self._rounds(range(self.size), joins=joins) for _ in range(2 if joins else 1)]
        for rank in self.simulation.ranks:
            rank.reducers.append(Reducer(self.simulation, rank.rank, epochs[0][rank.rank], rng, joins=joins,
                                         later=[epoch[rank.rank] for epoch in epochs[1:]]))
        if sets and not joins:
            rounds = self._rounds(sets, joins=False, prefix="second.")
            for rank in sets:
                self.simulation.ranks[rank].reducers.append(Reducer(self.simulation, rank, rounds[rank], rng, process_set=1,
                                                                    label="second"))
        count = 0 if joins or rng.random() < 0.4 else rng.randint(1, 5)
        singles = [rng.choice(["gpu", "gpu", "cpu"]) for _ in range(count)]
        self.singles = [[f"{kind}.{number}" for number, kind in enumerate(singles)] for _ in range(self.size)]
        self.dies = rng.choice([0, 0, 0, rng.randint(200, 4000)])
        self.leaves = rng.choice([0, 0, 0, rng.randint(200, 4000)]) if not joins else 0
        self.leaver: int | None = None

    def _add_set(self) -> tuple[int, ...]:
        members = tuple(sorted(self.rng.sample(range(self.size), 2)))
        for controller in self.simulation.controllers:
            controller.enqueue(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=members))
        self.simulation.settle()
        return members

    def _rounds(self, ranks: Sequence[int], *, joins: bool, prefix: str = "") -> dict[int, list[Round]]:
        """Return what ranks bring: nearly always the same."""
        rng = self.rng
        names = [prefix + name for name in NAMES[:rng.randint(1, 5)]]
        shapes = {name: rng.randint(1, 40) for name in names}
        brought: dict[int, list[Round]] = {rank: [] for rank in ranks}
        odd = rng.choice([0.0, 0.03, 0.15])
        for _ in range(rng.randint(10, 26)):
            event = rng.choice(["change", "one changes", "missing", "missing everywhere", "sparse", "one has more"]
                               ) if rng.random() < odd else ""
            name, one = rng.choice(names), rng.choice(list(ranks))
            if event == "change":
                shapes[name] += 1
            for rank in ranks:
                members, mine = dict(shapes), rank == one
                if event == "one changes" and mine:
                    members[name] += 1
                if event == "one has more" and mine:
                    members[prefix + "z"] = 3
                missing = frozenset([name] if event == "missing everywhere" or (event == "missing" and mine) else [])
                brought[rank].append(Round(members, missing, frozenset([name] if event == "sparse" else [])))
        if joins:
            for rank in ranks:
                del brought[rank][rng.randint(1, 6) if rng.random() < 0.5 else len(brought[rank]):]
        return brought

    @property
    def locked(self) -> int:
        return sum(rank.by_lock for rank in self.simulation.ranks)

    def is_over(self, rank: int) -> bool:
        """Whether a rank's script is over."""
        return rank in self.dead or rank == self.leaver or self.simulation.failures[rank] is not None or (
            not self.singles[rank] and self.blocked[rank] is None and all(
                reducer.over for reducer in self.simulation.ranks[rank].reducers)
            and not self.simulation.controllers[rank].unanswered())

    def act(self, rank: int) -> None:
        """Let a rank's script do something."""
        rng, singles = self.rng, self.singles[rank]
        controller = self.simulation.controllers[rank]
        if self.blocked[rank] is not None:
            if self.blocked[rank] in controller.unanswered():
                return
            self.blocked[rank] = None
        reducers = self.simulation.ranks[rank].reducers
        is_over = all(reducer.over for reducer in reducers)
        if singles and rng.random() < (0.2 if is_over else 0.05 if self.simulation.ranks[rank].state.locks else 0.003):
            name = singles.pop(0)
            controller.enqueue(Request(name, Collective.ALLREDUCE, "uint8", (4,)))
            self.blocked[rank] = name if rng.random() < 0.5 else None
            return
        rng.choice(reducers).act()

    def step(self, rank: int, action: float) -> None:
        simulation = self.simulation
        if rank in self.dead or simulation.failures[rank] is not None:
            return
        if action < 0.3:
            if rank != self.leaver:
                self.act(rank)
        elif action < 0.5:
            simulation.look(rank)
        elif action < 0.6:
            simulation.say(rank)
        elif action < 0.75:
            simulation.hear(rank)
        elif action < 0.85:
            simulation.decide()
        elif action < 0.999:
            simulation.apply(rank)
        elif action < 0.9994:
            simulation.ranks[rank].hurry()
        elif action < 0.9997:
            simulation.coordinator.order(status_requests=[rank])
        else:
            simulation.coordinator.tune({"bucket_size": 30 + 10 * rank}, simulation.now)

    def play(self) -> None:
        """Play the job to its end, and check it."""
        simulation, rng = self.simulation, self.rng
        for turn in range(100_000):
            self.step(rng.randrange(self.size), rng.random() * (1.0 if turn < CALM_AFTER else 0.9994))
            if turn == self.dies > 0:
                dead = rng.randrange(1, self.size)
                self.dead.add(dead)
                simulation.coordinator.lose(dead, "it died")
            if turn == self.leaves > 0:
                self.leaver = rng.randrange(self.size)
                simulation.ranks[self.leaver].leave()
            if turn % 500 == 0:
                if turn % 4000 == 0:
                    simulation.check_order(is_over=False)
                if all(map(self.is_over, range(self.size))):
                    break
        else:
            raise AssertionError("somebody waits for ever")
        if not self.dead:
            simulation.settle()
        simulation.check_order(is_over=not self.dead)
        if not self.dead and self.leaver is None:
            for number in range(max(len(rank.reducers) for rank in simulation.ranks)):
                here = [rank.reducers[number] for rank in simulation.ranks if number < len(rank.reducers)]
                check(simulation, here)
