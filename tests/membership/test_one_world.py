"""Jobs that are not elastic: one world, which the first failure ends. Their members say nothing to the authority."""

from __future__ import annotations

import math
import random

import pytest

from hvdlite.membership.events import GRACE, GRACE_AFTER_LOSS, Command, EndJob, Limits, StartMember, WorldBegun
from hvdlite.membership.members import WorldState
from tests.membership.talk import Talk


def fixed(**slots: int) -> Talk:
    size = sum(slots.values())
    return Talk(Limits(size, size, size, elastic_timeout=math.inf, hosts_are_fixed=True, one_world=True), **slots)


def kinds(commands: list[Command]) -> list[type[Command]]:
    return [type(command) for command in commands]


def test_all_ranks_are_started_in_the_order_of_the_slots_and_nothing_is_awaited() -> None:
    talk = fixed(a=2, b=1)
    assert talk.started() == [(0, "a", 0), (1, "a", 1), (2, "b", 0)] and WorldBegun(1, (0, 1, 2)) in talk.commands
    assert talk.authority.wake_at() is None and talk.authority.world.state is WorldState.MEETING


def test_ranks_that_end_with_0_leave_the_others_alone() -> None:
    talk = fixed(a=3)
    assert talk.gone(1, 0).commands == [] and talk.gone(0, 0).commands == [] and talk.authority.wake_at() is None
    end = talk.gone(2, 0).end()
    assert (end.code, end.reason, end.member, end.grace) == (0, "", None, 0.0)


@pytest.mark.parametrize(("code", "shell_code", "told"), [
    (5, 5, "rank 1 on a: exit code 5"), (-9, 137, "rank 1 on a: killed by signal 9 (SIGKILL)"), (1, 1, "rank 1 on a: E: x")])
def test_the_first_failure_ends_the_job(code: int, shell_code: int, told: str) -> None:
    talk = fixed(a=3).gone(1, code, "E: x" if code == 1 else "")
    assert kinds(talk.commands) == [EndJob], "no orders, no notes: hvdrun tells the cause when all have ended"
    end = talk.end()
    assert (end.code, end.member, end.grace) == (shell_code, 1, GRACE) and end.reason.startswith(told)
    assert talk.authority.is_over and talk.gone(0, 1).commands == [] and talk.lost("a").commands == []


def test_a_failure_after_others_have_ended_with_0() -> None:
    assert fixed(a=3).gone(0, 0).gone(2, 3).end().code == 3


def test_a_lost_host_ends_the_job_sooner() -> None:
    end = fixed(a=2, b=2).lost("b").end()
    assert (end.code, end.member, end.grace) == (1, None, GRACE_AFTER_LOSS)
    assert end.reason.startswith("rank 2 on b: the cable was cut")


def test_a_lost_host_whose_ranks_have_ended_changes_nothing() -> None:
    talk = fixed(a=1, b=2).gone(1, 0).gone(2, 0)
    assert talk.lost("b").commands == [] and talk.hosts(a=1).commands == [] and talk.gone(0, 0).end().code == 0


def test_no_rank_is_replaced_whatever_slots_there_are() -> None:
    talk = fixed(a=2)
    assert talk.hosts(a=4, b=4).commands == [] and talk.gone(0, 0).started() == [] and talk.wait(10_000).commands == []


def test_messages_of_members_change_nothing() -> None:
    """They have no socket; should one speak all the same, it is in the world as any other member."""
    talk = fixed(a=2).met().ready(0, 1)
    assert kinds(talk.commands) == [] and talk.gone(1, 4).end().code == 4


@pytest.mark.parametrize("seed", range(200))
def test_any_order_of_ends_has_one_end_of_the_job(seed: int) -> None:
    draw = random.Random(seed)
    slots = {host: draw.randint(1, 3) for host in "abc"[:draw.randint(1, 3)]}
    talk = fixed(**slots)
    running = {command.member: command.host for command in talk.commands if isinstance(command, StartMember)}
    ends: list[EndJob] = []
    expected = None
    while running:
        if draw.random() < 0.1:
            host = draw.choice(sorted(slots))
            gone = [member for member, where in running.items() if where == host]
            expected = expected if expected is not None or not gone else 1
            talk.lost(host)
        else:
            member, code = draw.choice(sorted(running)), draw.choice([0, 0, 0, 7, -11])
            gone = [member]
            expected = expected if expected is not None or not code else 128 - code if code < 0 else code
            talk.gone(member, code)
        for member in gone:
            del running[member]
        ends += [command for command in talk.commands if isinstance(command, EndJob)]
        assert set(kinds(talk.commands)) <= {EndJob} and bool(ends) == (expected is not None or not running)
    assert [end.code for end in ends] == [expected or 0]
