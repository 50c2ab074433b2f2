"""`stop_requested`: all ranks stop at the same step, whichever of them is asked (docs/protocol.md#agreed-calls)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.core.types import ReduceOp
from hvdlite.runtime.process_hooks import StopNotice
from hvdlite.runtime.runtime import Runtime
from tests.runtime.programs.stopping import until_stopped
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, Processes, clean_environment, threads


def train(runtime: Runtime, asked: dict[int, int], ends: dict[int, int], joins: bool) -> int | None:
    """Take steps until the stop, and return which; None on a rank that leaves before.

    Args:
        asked: by rank, the step at which it is asked to stop.
        ends: by rank, the step after which it leaves.
        joins: whether rank 0 joins after ten steps, the others after forty.
    """
    rank = runtime.world.rank
    generator = random.Random(rank)
    for step in range(1, 5000):
        if runtime.stop_request.is_due(step >= asked.get(rank, 5000), runtime.joins):
            return step
        time.sleep(generator.random() * 0.002)
        if step >= ends.get(rank, 5000):
            return None
        if joins and runtime.joins == 0 and step == (10 if rank == 0 else 40):
            runtime.join().wait()
        if step % 50 == 0 and not ends and not joins:
            runtime.allreduce("step", np.ones(1), np.empty(1), ReduceOp.SUM).wait()
    raise AssertionError("nobody has stopped")


@pytest.mark.parametrize("asked", [{0: 30}, {3: 30}, {1: 1, 2: 30, 3: 31}], ids=["rank 0", "another", "several"])
def test_all_ranks_stop_at_the_same_step(asked: dict[int, int]) -> None:
    steps = threads(4, train, asked, {}, False)
    assert len(set(steps)) == 1 and steps[0] >= min(asked.values()), steps


def save_now_and_then(runtime: Runtime, seed: int) -> list[int]:
    """Take steps; return those of agreed calls, which ranks want at random."""
    generator = random.Random(seed * 100 + runtime.world.rank)
    call = runtime.agreed_call("now and then")
    due = []
    for step in range(300):
        if call.is_due(generator.random() < 0.01, runtime.joins):
            due.append(step)
        time.sleep(generator.random() * 0.001)
    runtime.barrier("end").wait()
    return due


@pytest.mark.parametrize("seed", range(3))
def test_ranks_agree_again_and_again(seed: int) -> None:
    first, *others = threads(4, save_now_and_then, seed)
    assert len(first) > 2 and all(each == first for each in others)


@pytest.mark.long
def test_64_ranks_stop_at_the_same_step() -> None:
    assert len(set(threads(64, train, {17: 30}, {}, False))) == 1


def test_a_rank_that_has_left_counts_no_more() -> None:
    steps = threads(3, train, {2: 300}, {1: 20}, False)
    assert steps[1] is None and steps[0] == steps[2] and steps[0] >= 300


def test_steps_count_from_the_same_number_after_a_join() -> None:
    first, *others = threads(3, train, {1: 100}, {}, True)
    assert set(others) == {first + 30}, "rank 0 has made thirty steps less before it"


def test_a_signal_to_one_rank_stops_all_and_the_scripts_handler_still_runs() -> None:
    with Processes(3, until_stopped, 7) as world:
        world.wait_for_all("trains")
        world.kill(1, signal.SIGUSR1)
        ended = world.wait(HANGS_SECONDS)
    assert [each.code for each in ended] == [0, 0, 0], ended
    steps, handled = zip(*[each.result for each in ended], strict=True)
    assert len(set(steps)) == 1 and handled == (0, 1, 0)


def test_a_rank_that_dies_while_ranks_agree_ends_the_wait() -> None:
    with Processes(3, until_stopped, 10**9) as world:
        world.wait_for_all("trains")
        world.kill(2, signal.SIGSTOP)
        world.kill(1, signal.SIGUSR1)
        time.sleep(0.5)  # the others wait for its answer, or are about to
        world.kill(2)
        ended = world.wait(HANGS_SECONDS)
    assert [each.code for each in ended] == [1, 1, -9] and all("rank 2" in each.stderr for each in ended[:2]), ended


def test_an_elastic_job_comes_out_of_run_after_sigterm() -> None:
    """hvdrun still tells its members that all have finished."""
    ended = subprocess.run([*HVDRUN, "-np", "3", "--min-np", "1", "--no-prefix", sys.executable, "-m",
                            "tests.runtime.programs.stopping"], capture_output=True, text=True, timeout=HANGS_SECONDS,
                           check=False, env={**clean_environment(), "PYTHONPATH": PYTHON_PATH})
    assert ended.returncode == 143 and "ended by SIGTERM; all ranks ended in time" in ended.stderr, ended
    first, *others = ended.stdout.splitlines()
    assert first.startswith("stopped at") and others == [first, first], ended


def test_signals_with_another_meaning_are_left_alone() -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    try:
        called: list[Any] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
        notice = StopNotice()
        notice.watch({signal.SIGUSR2})
        notice.watch({signal.SIGUSR2})
        assert signal.getsignal(signal.SIGUSR2) is before[signal.SIGUSR2]
        assert not notice.is_given
        signal.raise_signal(signal.SIGUSR1)
        assert notice.is_given and called == [signal.SIGUSR1]
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])  # a framework takes it over, and gives it back
        notice.watch({signal.SIGUSR2})
        assert signal.getsignal(signal.SIGTERM) == notice._handle
        child = os.fork()
        if child == 0:
            os._exit(signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM])
        assert os.waitpid(child, 0)[1] == 0, "or nobody could end the script's own workers"
        notice.release()
        assert all(signal.getsignal(each) is before[each] for each in (signal.SIGTERM, signal.SIGUSR2))
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_sigterm_is_told_where_the_script_does_not_ask() -> None:
    """docs/protocol.md#notices"""
    before = signal.getsignal(signal.SIGTERM)
    told: list[str] = []

    def tell(answer: bool) -> Callable[[], bool]:
        return lambda: told.append("told") is None and answer

    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        notice = StopNotice()
        with notice.telling(tell(True)):
            signal.raise_signal(signal.SIGTERM)
            child = os.fork()
            if child == 0:
                os._exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
            assert os.waitpid(child, 0)[1] == 0, "nor is a worker of the script's a member"
        assert told == ["told"] and not notice.is_given and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with notice.telling(tell(True)):
            notice.watch(())
            signal.raise_signal(signal.SIGTERM)
        assert told == ["told"] and notice.is_given and signal.getsignal(signal.SIGTERM) == notice._handle, "it asks"
        with notice.telling(tell(True)):
            signal.raise_signal(signal.SIGTERM)
        notice.release()
        signal.signal(signal.SIGTERM, lambda number, frame: told.append("script"))
        with notice.telling(tell(True)):
            signal.raise_signal(signal.SIGTERM)
        assert told == ["told", "script"]
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with StopNotice().telling(tell(False)):
                signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM, "the whole job ends"
    finally:
        signal.signal(signal.SIGTERM, before)
