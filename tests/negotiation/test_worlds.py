"""Elastic training as a model: deaths at any message, several worlds, and messages of old ones (docs/protocol.md#epochs).

`python -m tests.negotiation` plays more of it. The second test breaks the product on purpose, and the model must see it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hvdlite.membership import authority, recovery
from hvdlite.membership.members import JobWorld, MemberState
from hvdlite.membership.recovery import Recovery, recover
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.leader import Leader
from tests.membership.model import play_job
from tests.negotiation import rank_of_world
from tests.negotiation.trainer import TrainingJob

STEPS = 500
BROKEN_STEPS = 20_000
"""Within so many steps the model has to see what is broken."""


def play(steps: int, first: int = 0) -> None:
    """Play jobs with so many steps, from a first seed on. What is asserted stands in `trainer.py` and `rank_of_world.py`."""
    made = 0
    for seed in itertools.count(first):
        job = TrainingJob(seed)
        play_job(job)
        made += job.steps_made
        if made >= steps:
            return


def test_no_step_is_lost_after_a_commit_repeated_or_mixed() -> None:
    play(STEPS)


Break = Callable[[pytest.MonkeyPatch], None]
BREAKS: dict[str, Break] = {}
SEEDS: dict[str, int] = {}
SLOW = ("a_world_begins_before_the_killed_ones_of_the_last_are_dead",)


def breaks(seed: int) -> Callable[[Break], Break]:
    """Register a way to break the product, and a seed from which on it is soon seen."""
    def registered(function: Break) -> Break:
        BREAKS[function.__name__], SEEDS[function.__name__] = function, seed
        return function
    return registered


def ignore_epoch(monkeypatch: pytest.MonkeyPatch, role: Any, method: str) -> None:
    """Let a role take a message for one of its own world."""
    real = getattr(role, method)

    def taken(self: Any, *arguments: Any) -> Any:
        renamed = [msgspec.structs.replace(each, epoch=self.epoch) if hasattr(each, "epoch") else each for each in arguments]
        return real(self, *renamed)
    monkeypatch.setattr(role, method, taken)


@breaks(9)
def the_coordinator_takes_reports_of_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_epoch(monkeypatch, Coordinator, "receive")


@breaks(0)
def the_coordinator_takes_reports_of_leaders_of_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Coordinator.receive_host

    def taken(self: Coordinator, ranks: Any, report: Any, now: float) -> None:
        items = tuple(msgspec.structs.replace(item, report=msgspec.structs.replace(item.report, epoch=self.epoch))
                      if hasattr(item, "report") else item for item in report.items)
        real(self, ranks, msgspec.structs.replace(report, epoch=self.epoch, items=items), now)
    monkeypatch.setattr(Coordinator, "receive_host", taken)


@breaks(25)
def a_leader_takes_reports_of_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_epoch(monkeypatch, Leader, "receive")


@breaks(0)
def ranks_take_decisions_of_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Controller.is_foreign
    monkeypatch.setattr(Controller, "is_foreign",
                        lambda self, message: hasattr(message, "rank") and real(self, message))


@breaks(4)
def ranks_take_direct_messages_of_any_world(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Controller.is_foreign
    monkeypatch.setattr(Controller, "is_foreign",
                        lambda self, message: not hasattr(message, "rank") and real(self, message))


@breaks(11)
def the_state_comes_from_the_rank_with_the_fewest_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(reports: Any) -> Recovery:
        having = {member: standing for member, standing in reports.items() if standing.has_state}
        commits = min((standing.commits for standing in having.values()), default=0)
        donors = tuple(member for member, standing in having.items() if standing.commits == commits)
        return dataclasses.replace(recover(reports), donors=donors, commits=commits)
    monkeypatch.setattr(recovery, "recover", wrong)
    monkeypatch.setattr(authority, "recover", wrong)
    monkeypatch.setattr("tests.membership.model.Job.begun", lambda self, command: self.worlds.update(
        {command.epoch: command.members}))  # it would see that, too


@breaks(11)
def nobody_goes_back_to_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "recover", lambda reports: dataclasses.replace(recover(reports), restore=False))
    monkeypatch.setattr("tests.membership.model.Job.check_order", lambda self, process, order: None)


@breaks(261)
def members_that_have_stepped_are_donors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "recover", lambda reports: recover({
        member: msgspec.structs.replace(report, can_resume=report.can_resume or report.boundaries > 0)
        for member, report in reports.items()}))
    _see_only_parameters(monkeypatch)


@breaks(0)
def nobody_runs_a_body_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "recover", lambda reports: recover({
        member: msgspec.structs.replace(report, can_resume=False) for member, report in reports.items()}))
    _see_only_parameters(monkeypatch)


def _see_only_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what would see the reports, and the orders that they lead to."""
    monkeypatch.setattr("tests.membership.model.Job.begun", lambda self, command: self.worlds.update(
        {command.epoch: command.members}))
    monkeypatch.setattr("tests.membership.model.Job.check_order", lambda self, process, order: None)


@breaks(0)
def a_world_begins_before_the_killed_ones_of_the_last_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobWorld, "living", lambda self: [
        member for member in self.members if member.state not in (MemberState.GONE, MemberState.KILLED)])
    monkeypatch.setattr("tests.membership.model.Job.begun", lambda self, command: self.worlds.update(
        {command.epoch: command.members}))


@breaks(0)
def memory_of_the_old_world_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is written before a world ends is taken for that of the next one's first step."""
    real = rank_of_world.FillingController.enqueue
    last: dict[Any, Any] = {}

    def kept(self: Any, request: Any) -> None:
        real(self, request)
        if request.label:
            self.tensors[request.key] = last.setdefault((self.rank, request.key), self.tensors[request.key])
    monkeypatch.setattr(rank_of_world.FillingController, "enqueue", kept)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in BREAKS])
def test_the_model_sees_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS[name](monkeypatch)
    with pytest.raises(AssertionError):
        play(BROKEN_STEPS, SEEDS[name])
