"""Mailboxes between processes; tests/negotiation/test_mailboxes.py has the schedules."""

from __future__ import annotations

import signal

import pytest

from hvdlite.memory import futex
from tests.runtime.programs import mailboxes as programs
from tests.worlds import HANGS_SECONDS, Processes, processes

pytestmark = pytest.mark.skipif(not futex.AVAILABLE, reason="needs futexes")


def test_results_are_those_of_requests() -> None:
    processes(2, programs.results_are_those_of_requests)


# docs/protocol.md#mailboxes
def test_whatever_ends_a_mailbox_the_calls_go_on() -> None:
    processes(3, programs.whatever_ends_a_mailbox_the_calls_go_on)


def test_an_interrupted_call_counts() -> None:
    interrupted, _ = (ended.result for ended in processes(2, programs.an_interrupted_call_counts, 20))
    assert interrupted > 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_ends_waits_in_mailboxes(victim: int) -> None:
    with Processes(2, programs.until_one_dies) as world:
        world.wait_for(victim, "running")
        world.kill(victim, signal.SIGKILL)
        survivor = world.wait(HANGS_SECONDS)[1 - victim]
        assert survivor.code == 1 and f"PeerLostError: rank {victim} was lost" in survivor.stderr, survivor
