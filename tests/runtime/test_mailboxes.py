"""Mailboxes between processes; tests/negotiation/test_mailboxes.py has the schedules."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.memory import futex
from hvdlite.runtime.runtime import Runtime
from tests.runtime.programs import mailboxes as programs
from tests.worlds import HANGS_SECONDS, Processes, processes, threads

pytestmark = pytest.mark.skipif(not futex.AVAILABLE, reason="needs futexes")


def test_results_are_those_of_requests() -> None:
    processes(2, programs.results_are_those_of_requests)


@pytest.mark.parametrize("size", [2, 3])
def test_all_kinds_give_what_requests_give(size: int) -> None:
    processes(size, programs.all_kinds_give_what_requests_give)


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_of_all_kinds_in_sets_that_overlap(seed: int) -> None:
    learned = [rank.result for rank in processes(3, programs.random_calls_in_several_sets, seed)]
    assert min(learned) > 50, learned


# docs/protocol.md#mailboxes
def test_whatever_ends_a_mailbox_the_calls_go_on() -> None:
    processes(3, programs.whatever_ends_a_mailbox_the_calls_go_on)


@pytest.mark.parametrize("kind", ["allreduce", "broadcast"])
def test_an_array_that_cannot_receive_the_result_is_refused_at_the_call(kind: str) -> None:
    def step(runtime: Runtime) -> None:
        array = np.frombuffer(bytes(16), np.float32)
        with pytest.raises(UnsupportedError, match=r"'x': the array of shape \[4\] is read-only"):
            if kind == "allreduce":
                runtime.allreduce("x", array, array, ReduceOp.SUM, blocking=True)
            else:
                runtime.broadcast("x", array, 0, blocking=True)
        assert runtime.broadcast("x", array.copy(), 0).wait().tolist() == [0.0] * 4, "its name is free"
    threads(2, step)


def test_an_interrupted_call_counts() -> None:
    interrupted, _ = (ended.result for ended in processes(2, programs.an_interrupted_call_counts, 20))
    assert interrupted > 0


# docs/protocol.md#silence
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_told_to_who_waits_in_a_mailbox(victim: int) -> None:
    with Processes(2, programs.until_one_dies, environment={"HVDLITE_SILENCE_CHECK_SECONDS": "0.3"}) as world:
        world.wait_for(victim, "running")
        world.kill(victim, signal.SIGSTOP)
        world.wait_for(1 - victim, "is stopped (SIGSTOP", stream="stderr")
        world.kill(victim, signal.SIGCONT)
        world.wait_for(1 - victim, f"rank {victim} answers again", stream="stderr")


def test_a_death_ends_waits_in_mailboxes() -> None:
    with Processes(2, programs.until_one_dies) as world:
        world.wait_for(1, "running")
        world.kill(1, signal.SIGKILL)
        survivor, _ = world.wait(HANGS_SECONDS)
        assert survivor.code == 1 and "PeerLostError: rank 1 was lost" in survivor.stderr, survivor
