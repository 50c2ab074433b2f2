"""Locked rounds: whatever the schedule, ranks launch in one order, and every member of every round is answered once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from hvdlite.core.device import CPU
from hvdlite.core.types import Collective
from hvdlite.engine.mailboxes import Mailboxes
from hvdlite.handoff.locked_rounds import LockedRounds
from hvdlite.memory.mailbox_area import MailboxArea, area_bytes
from hvdlite.negotiation.locks import Locks
from hvdlite.negotiation.messages import BucketReady, Layout, Mailbox, Request, RoundDone
from tests.negotiation.locked_ranks import LockedSimulation, Play, entry_of, let_locks_open_soon
from tests.negotiation.reducers import Reducer, Round, steady

GAMES, BROKEN_GAMES = 25, 60


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    let_locks_open_soon(monkeypatch.setattr)


def play(games: int, first: int = 0) -> int:
    locked = 0
    for seed in range(first, first + games):
        game = Play(seed)
        game.play()
        locked += game.locked
    return locked


# docs/protocol.md#locked-rounds
def test_ranks_launch_in_one_order() -> None:
    assert play(GAMES) > 10 * GAMES, "hardly anything was locked"


Break = Callable[[pytest.MonkeyPatch], None]
BREAKS: dict[str, Break] = {}
SEEDS: dict[str, int] = {}


def breaks(seed: int) -> Callable[[Break], Break]:
    """Register a way to break the product, and a seed from which on it is soon seen."""
    def registered(function: Break) -> Break:
        BREAKS[function.__name__], SEEDS[function.__name__] = function, seed
        return function
    return registered


@breaks(0)
def buckets_are_launched_before_all_have_announced_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was proposed first: agreement trails."""
    monkeypatch.setattr(LockedRounds, "is_complete", lambda self, slot: slot in self._entries and slot <= self.announced)


@breaks(1)
def ranks_announce_on_after_the_first_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    withdraw, close = Mailboxes._withdraw, Mailboxes.close_lock

    def wrong(self: Any, mailbox_id: int, launch: Any) -> None:
        lock = self._locks.get(mailbox_id)
        if lock is not None:
            withdraw(self, lock)
            lock._is_frozen = True
        close(self, mailbox_id, launch)
    monkeypatch.setattr(Mailboxes, "_withdraw", lambda self, lock: None)
    monkeypatch.setattr(Mailboxes, "close_lock", wrong)
    monkeypatch.setattr(LockedRounds, "freeze", lambda self: self.announced)


@breaks(14)
def complete_buckets_are_reported_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LockedRounds.close

    def wrong(self: Any, launch: Any) -> Any:
        monkeypatch.setattr(self, "is_complete", lambda slot: False, raising=False)
        return real(self, launch)
    monkeypatch.setattr(LockedRounds, "close", wrong)


@breaks(14)
def nothing_waits_for_the_end_of_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Locks.holds

    def wrong(self: Any, item: Any, now: float) -> bool:
        real(self, item, now)
        return False
    monkeypatch.setattr(Locks, "holds", wrong)


@breaks(2)
def other_work_on_gpus_does_not_end_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Locks._ends
    monkeypatch.setattr(Locks, "_ends",
                        lambda self, item: real(self, item) and not getattr(item, "name", "").startswith("gpu"))


@breaks(4)
def buckets_without_some_gradients_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LockedRounds.put

    def wrong(self: Any, entry: Any) -> bool:
        entry.ready = type(entry.ready)(bucket_id=entry.ready.bucket_id, round_id=entry.ready.round_id,
                                        ends_round=entry.ready.ends_round, step=entry.ready.step)
        return real(self, entry)
    monkeypatch.setattr(LockedRounds, "put", wrong)


@breaks(25)
def nobody_ends_a_lock_in_which_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LockedRounds, "_tell_stale", lambda self, entry: None)


@pytest.mark.parametrize("name", BREAKS)
def test_the_model_sees_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS[name](monkeypatch)
    with pytest.raises(AssertionError):
        play(BROKEN_GAMES, SEEDS[name])


def locked_simulation(size: int) -> tuple[LockedSimulation, list[Reducer]]:
    """Return ranks that have made rounds until they have a lock, and are between two rounds."""
    simulation = LockedSimulation(size)
    reducers = [Reducer(simulation, rank, [Round({"a": 30, "b": 40})] * 20, random.Random(1)) for rank in range(size)]
    for rank, reducer in zip(simulation.ranks, reducers, strict=True):
        rank.reducers.append(reducer)
    while simulation.ranks[0].by_lock < 4 or any(reducer.to_give is not None for reducer in reducers):
        for reducer in reducers:
            if reducer.number < 12 or reducer.to_give is not None:
                reducer.act()
        for rank in range(size):
            simulation.look(rank)
        simulation.settle()
    return simulation, reducers


# docs/protocol.md#locked-rounds
def test_a_rank_that_does_not_come_is_named() -> None:
    simulation, reducers = locked_simulation(3)
    for _ in range(4):
        reducers[0].act()
        reducers[2].act()
    assert not simulation.coordinator.is_anything_pending, "buckets of a lock are not reported"
    simulation.ranks[0].hurry()  # its thread has been blocked for long
    simulation.settle()
    stalls = simulation.coordinator.pending(0.0)
    assert stalls and all(stall.missing == (1,) and stall.enqueued == (0, 2) for stall in stalls)
    for _ in range(4):
        reducers[1].act()
    simulation.settle()
    assert not simulation.coordinator.is_anything_pending
    simulation.check_order(is_over=True)


def test_a_rank_that_does_not_end_a_lock_is_named() -> None:
    """Its background thread does not answer."""
    simulation, reducers = locked_simulation(2)
    reducers[0].act()
    simulation.controllers[0].enqueue(Request("gpu", Collective.ALLREDUCE, "uint8", (4,)))
    simulation.say(0)
    simulation.hear(0)
    simulation.decide()
    simulation.apply(0)
    simulation.say(0)
    simulation.hear(0)
    (stall,) = simulation.coordinator.pending(0.0)
    assert stall.name == "the buckets of set" and 1 in stall.missing
    simulation.apply(1)
    simulation.settle()
    (stall,) = simulation.coordinator.pending(0.0)
    assert stall.name == "gpu" and stall.missing == (1,), "what has waited for that comes to its turn"


@pytest.mark.parametrize(("device", "ends"), [("cuda", True), (CPU, False)])
def test_a_set_that_may_learn_a_layout_on_gpus_ends_a_lock(device: str, ends: bool) -> None:
    """Its buffers are registered with NCCL by calls of the communicators that a lock's members use."""
    simulation, _ = locked_simulation(2)
    member = Request("b", Collective.ALLREDUCE, "uint8", (4,), label="other", round_id=1, device=device)
    negotiator = simulation.coordinator.negotiator
    negotiator.gradient_sets.observe(dict.fromkeys(range(2), member))
    assert negotiator.locks.holds(RoundDone("other", 1, 0), 0.0) == ends
    assert negotiator.locks.is_ending == ends


def test_ranks_at_different_steps_do_not_meet() -> None:
    memory, told, launched = bytearray(area_bytes(0, 2)), [], []  # type: ignore[var-annotated]
    simulation, _ = steady(2, {"a": 30}, 3)
    (layout,) = [instruction for instruction in simulation.plans[0] if isinstance(instruction, Layout)]
    mailbox = Mailbox(mailbox_id=1, stem="x", process_set_id=0, area=0, capacity=0, first_round=1, layout_id=1,
                      layout_round=5)
    ends = [LockedRounds(mailbox, layout, MailboxArea(memory, rank, 2, 0), launched.append, told.append, told.append,
                         lambda act: act()) for rank in range(2)]
    for end, step in zip(ends, (7, 8), strict=True):
        ready = BucketReady(bucket_id=layout.buckets[0].bucket_id, round_id=5, step=step)
        assert end.take(entry_of(layout.buckets[0], ready))
    assert not launched and told
    for end in ends:
        assert end.freeze() == 1
    assert [len(end.close(launched.append)[0]) for end in ends] == [1, 1] and not launched, "they are reported, and refused"
