"""Locked rounds: whatever the schedule, ranks launch in one order, and every member of every round is answered once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvdlite.handoff.locked_rounds import LockedRounds
from hvdlite.negotiation import locks
from hvdlite.negotiation.locks import Locks
from hvdlite.negotiation.mailboxes import MailboxTable
from tests.negotiation.locked_ranks import Play

GAMES, BROKEN_GAMES = 40, 400


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model lets launchers look when it is their turn."""
    monkeypatch.setattr(LockedRounds, "start", lambda self, name: None)
    monkeypatch.setattr(locks, "OPENS_AFTER", 1)


def play(games: int) -> int:
    locked = 0
    for seed in range(games):
        game = Play(seed)
        game.play()
        locked += game.locked
    return locked


# docs/protocol.md#locked-rounds
def test_ranks_launch_in_one_order() -> None:
    assert play(GAMES) > 10 * GAMES, "hardly anything was locked"


Break = Callable[[pytest.MonkeyPatch], None]
BREAKS: dict[str, Break] = {}


def breaks(function: Break) -> Break:
    """Register a way to break the product."""
    BREAKS[function.__name__] = function
    return function


@breaks
def buckets_are_launched_before_all_have_announced_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was proposed first: agreement trails."""
    monkeypatch.setattr(LockedRounds, "is_complete", lambda self, slot: slot in self._entries and slot <= self.announced)


@breaks
def ranks_launch_on_after_the_first_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LockedRounds, "freeze", lambda self: self.announced)


@breaks
def complete_buckets_are_reported_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LockedRounds.close

    def wrong(self: Any, launch: Any) -> Any:
        monkeypatch.setattr(self, "is_complete", lambda slot: False, raising=False)
        return real(self, launch)
    monkeypatch.setattr(LockedRounds, "close", wrong)


@breaks
def nothing_waits_for_the_end_of_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Locks.holds

    def wrong(self: Any, item: Any, now: float) -> bool:
        real(self, item, now)
        return False
    monkeypatch.setattr(Locks, "holds", wrong)


@breaks
def other_work_on_gpus_does_not_end_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Locks._ends
    monkeypatch.setattr(Locks, "_ends", lambda self, item: real(self, item) and not getattr(item, "name", "").startswith("gpu"))


@breaks
def a_lock_begins_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MailboxTable.open_lock
    monkeypatch.setattr(MailboxTable, "open_lock", lambda self, layout, members, layout_round, *more: real(
        self, layout, members, layout_round - 1, *more))


@breaks
def steps_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.skip("the scripts of the model make no steps")


@breaks
def buckets_without_some_gradients_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LockedRounds.put

    def wrong(self: Any, entry: Any) -> bool:
        entry.ready = type(entry.ready)(bucket_id=entry.ready.bucket_id, round_id=entry.ready.round_id,
                                        ends_round=entry.ready.ends_round, step=entry.ready.step)
        return real(self, entry)
    monkeypatch.setattr(LockedRounds, "put", wrong)


@breaks
def nobody_ends_a_lock_in_which_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LockedRounds, "_tell_stale", lambda self, entry: None)


@pytest.mark.parametrize("name", BREAKS)
def test_the_model_sees_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS[name](monkeypatch)
    with pytest.raises(AssertionError):
        play(BROKEN_GAMES)
