"""Shares of global batches: whole rows, decisions from simulated speeds, and ranks that decide alike."""

from __future__ import annotations

import itertools
import math
import random
import re
import socket
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.core.errors import MismatchError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.mirrored import shares as module
from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite.training.mirrored.shards import Split, disjoint_shard, equal_split, rows_of_ranks
from hvdlite.training.mirrored.shares import AHEAD, EVERY, Measured, Shares, balanced, limits_asked, shares_asked, with_means
from tests.worlds import threads

SHARES = st.lists(st.floats(0.01, 100), min_size=1, max_size=6).map(tuple)
SPEEDS = ([1.0, 1.0, 1.0, 3.0], [3.0, 1.0, 1.0, 1.0])
"""Seconds for a row by rank, before and after a change."""


@given(st.integers(1, 9), st.integers(0, 200))
def test_equal_shares_differ_by_one_row_and_small_batches_are_on_all_ranks(size: int, rows: int) -> None:
    owns = [equal_split(rank, size).own(rows) for rank in range(size)]
    assert owns == [disjoint_shard(rows, rank, size) if rows >= size else slice(0, rows) for rank in range(size)]


@given(SHARES, st.integers(0, 300))
def test_every_row_is_on_one_rank_and_no_rank_is_idle(shares: tuple[float, ...], more: int) -> None:
    rows = len(shares) + more
    counts = rows_of_ranks(rows, shares)
    assert sum(counts) == rows and min(counts) >= 1
    ends = list(itertools.accumulate(counts))
    splits = [Split(rank, shares) for rank in range(len(shares))]
    assert [split.own(rows) for split in splits] == [slice(end - each, end) for end, each in zip(ends, counts, strict=True)]
    assert sum(split.weight(rows) for split in splits) == pytest.approx(len(shares))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.integers(0, 9),
       st.none() | st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_no_other_rows_would_take_less_time(shares: tuple[int, ...], more: int, limits: list[int] | None) -> None:
    rows = len(shares) + more
    most = tuple(limits[:len(shares)]) if limits else (rows,) * len(shares)
    possible = [counts for counts in itertools.product(*(range(1, limit + 1) for limit in most)) if sum(counts) == rows]
    if not possible:
        with pytest.raises(ValueError, match=re.escape(f"{rows} rows is larger than max_rows={list(most)}")):
            rows_of_ranks(rows, shares, most)
        return
    counts = rows_of_ranks(rows, shares, most if limits else None)
    assert counts in possible

    def seconds(counts: Sequence[int]) -> float:
        return max(count / share for count, share in zip(counts, shares, strict=True))
    assert seconds(counts) == pytest.approx(min(map(seconds, possible)))


def test_large_batches_on_many_ranks() -> None:
    shares = tuple(float(1 + rank % 7) for rank in range(1000))
    counts = rows_of_ranks(1_000_000, shares)
    assert sum(counts) == 1_000_000
    assert all(abs(count - share * 1_000_000 / sum(shares)) <= 2 for count, share in zip(counts, shares, strict=True))


class Simulation:
    """Ranks that need seconds + seconds for a row * rows, times noise, for a batch."""

    def __init__(self, rows: int, noise: float, constant: float = 0.0, limits: tuple[int, ...] | None = None) -> None:
        self.rows, self.noise, self.constant, self.limits = rows, noise, constant, limits
        self.times: list[float] = []
        self.counts: list[tuple[int, ...]] = []

    def run(self, steps: int, cost: Callable[[int], Sequence[float]], seed: int = 0) -> Simulation:
        rng, size = random.Random(seed), len(cost(0))
        decisions, windows = [(0, (1.0,) * size)], [list[tuple[float, float]]() for _ in range(size)]
        for step in range(steps):
            shares = next((shares for since, shares in reversed(decisions) if since <= step - AHEAD), decisions[0][1])
            counts = rows_of_ranks(self.rows, shares, self.limits)
            own = [self._seconds(each, count, rng) for each, count in zip(cost(step), counts, strict=True)]
            self.times.append(max(own))
            self.counts.append(counts)
            for window, seconds, count in zip(windows, own, counts, strict=True):
                window.append((seconds / count, count))
            if (step + 1) % EVERY == 0:
                found = balanced([Measured.of(window) for window in windows], self.limits)
                decisions += [] if found is None else [(step + 1, found)]
                windows = [[] for _ in range(size)]
        return self

    def best(self, cost: Sequence[float]) -> float:
        """Return the mean time of a batch with the rows that take least time without noise."""
        counts, rng = [1] * len(cost), random.Random(99)
        for _ in range(self.rows - len(cost)):
            rank = min(range(len(cost)), key=lambda each: self.constant + cost[each] * (counts[each] + 1))
            counts[rank] += 1
        return statistics.fmean(max(self._seconds(each, count, rng) for each, count in zip(cost, counts, strict=True))
                                for _ in range(3000))

    def _seconds(self, cost: float, count: int, rng: random.Random) -> float:
        return (self.constant + cost * count) * math.exp(rng.gauss(0, self.noise))


@pytest.mark.parametrize(("noise", "constant"), [(0.0, 0.0), (0.05, 0.0), (0.1, 0.0), (0.05, 20.0)])
def test_speeds_that_change_are_followed_in_150_batches_without_oscillation(noise: float, constant: float) -> None:
    for seed in range(3):
        ran = Simulation(256, noise, constant).run(2000, lambda step: SPEEDS[step >= 1000], seed)
        for cost, times in zip(SPEEDS, (ran.times[150:1000], ran.times[1150:]), strict=True):
            assert statistics.fmean(times) < 1.05 * ran.best(cost)
        changes = [step for step, pair in enumerate(itertools.pairwise(ran.counts)) if len(set(pair)) > 1]
        assert len(changes) <= 10 and not [step for step in changes if 400 < step < 1000 or step > 1400]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.3])
def test_equal_machines_keep_equal_shares(noise: float) -> None:
    ran = Simulation(256, noise).run(2000, lambda step: [1.0] * 4)
    assert set(ran.counts) == {(64,) * 4}


def test_a_rank_that_is_hopeless_keeps_a_row_and_a_limit_holds() -> None:
    ran = Simulation(64, 0.02, limits=(64, 20, 64, 64)).run(600, lambda step: [1.0, 1.0, 1.0, 1000.0])
    assert ran.counts[-1][3] == 1 and all(counts[1] <= 20 for counts in ran.counts)
    assert len(set(ran.counts[400:])) == 1


def test_pauses_and_batches_that_were_not_measured_decide_nothing() -> None:
    with_pauses = Measured.of([(1.0, 8.0)] * 40 + [(500.0, 8.0)] * 10)
    assert with_pauses.seconds == 1.0
    assert balanced([with_pauses, Measured(3.0, 0.0, 8.0)]) is not None
    assert balanced([with_pauses, Measured.of([])]) is None


def test_rows_at_most_double_or_halve_in_a_decision() -> None:
    found = balanced([Measured(1.0, 0.0, 100.0), Measured(50.0, 0.0, 100.0)])
    assert found is not None and found[1] == 50.0 and found[0] == pytest.approx(196, abs=0.1)


@pytest.mark.parametrize(("asked", "told"), [
    ([1, 2, 3], "a list of 2 positive numbers"), ([1, 0], "positive numbers"), ([True, 2], "positive numbers"),
    ([1, math.inf], "positive numbers"),
    ("fast", "'fast'"), (2.0, "not 2.0"), ({"a": 1}, "name ['a'], but the ranks are on ['a', 'b']"),
    ({"a": 1, "b": 2, "c": 3}, "name ['a', 'b', 'c'], but")])
def test_other_shares_are_refused(asked: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        shares_asked(asked, ["a", "b"])


def test_shares_and_limits_as_asked() -> None:
    assert shares_asked({"a": 2, "b": 1}, ["b", "a", "a"]) == (1.0, 2.0, 2.0)
    assert shares_asked(None, ["a", "b"]) == shares_asked("auto", ["a", "b"]) == (1.0, 1.0)
    assert limits_asked(8, 2) == (8, 8) and limits_asked([8, 9], 2) == (8, 9) and limits_asked(None, 2) is None
    for refused in (0, [8], "8", 1.5, [8, -1]):
        with pytest.raises(ValueError, match="max_rows is the most rows of a rank, or a list of 2 numbers"):
            limits_asked(refused, 2)


def test_elastic_worlds_take_the_numbers_of_their_ranks(caplog: pytest.LogCaptureFixture) -> None:
    def asked(shares: Any, hosts: str) -> tuple[float, ...]:
        return with_means(shares_asked(shares, list(hosts), is_elastic=True))
    assert asked([3, 1], "a") == (3.0,) and asked([3, 1], "abc") == (3.0, 1.0, 2.0)
    assert asked({"a": 3, "b": 1}, "bb") == (1.0, 1.0) and asked({"a": 3, "b": 1}, "cab") == (2.0, 3.0, 1.0)
    assert asked({"a": 3}, "bc") == (1.0, 1.0)
    with pytest.raises(ValueError, match="not \\[3, 0\\]"):
        asked([3, 0], "a")

    def step(runtime: Runtime) -> tuple[float, ...]:
        replicas = ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID)
        return Shares(replicas, [3, 1], is_elastic=True).first.shares
    assert threads(3, step) == [(3.0, 1.0, 2.0)] * 3
    [record] = caplog.records
    assert record.getMessage().startswith("shares=[3, 1] have no number for ranks [2], on ['")


def test_a_world_begins_with_the_speeds_of_the_world_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 is new, and rank 0 has been alone for a while."""
    clocks = dict.fromkeys(range(3), 0.0)
    monkeypatch.setattr(module.Shares, "clock", lambda self: clocks[self._replicas.replica_id])
    before: dict[int, Shares] = {}

    def step(runtime: Runtime) -> tuple[float, ...]:
        rank = runtime.world.rank
        shares = before[rank] = Shares(ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID), "auto", before=before.get(rank))
        current = shares.begin()
        for _ in range(EVERY + 5 if len(runtime.members(GLOBAL_PROCESS_SET_ID)) == 2 else 5):
            mine = current.own(30)
            if rank < 2:
                clocks[rank] += [0.5, 1.0][rank] * (mine.stop - mine.start)
            current.finished()
        return shares.first.shares
    assert threads(2, step) == [(1.0, 1.0)] * 2
    assert threads(1, step) == [(1.0,)]
    assert threads(3, step) == [(2.0, 1.0, 1.5)] * 3


def test_ranks_make_batches_as_early_as_one_of_them() -> None:
    def step(runtime: Runtime) -> int:
        shares = Shares(ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID), "auto", prefetched=[0, 7][runtime.world.rank])
        return shares.begin(2)._begin
    assert threads(2, step) == [-2 - 7 - AHEAD] * 2


def test_ranks_that_ask_for_different_shares_are_told_so() -> None:
    def step(runtime: Runtime) -> None:
        replicas = ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID)
        told = "replica 0 has shares=[1, 2], max_rows=None, replica 1 shares=[2, 1]"
        with pytest.raises(MismatchError, match=re.escape(told)):
            Shares(replicas, [[1, 2], [2, 1]][runtime.world.rank])
        told = "replica 0 has shares=None, max_rows=None, replica 1 shares=None, max_rows=[3, 4]"
        with pytest.raises(MismatchError, match=re.escape(told)):
            Shares(replicas, None, [None, [3, 4]][runtime.world.rank])
    threads(2, step)


@pytest.mark.parametrize("forms", [
    ([3, 1], [3.0, 1.0]), ((3, 1), list(np.array([3, 1]))), (np.array([3, 1]), np.array([3, 1], np.float32)),
    ({"a": 3, "b": 1.5}, {"b": np.float64(1.5), "a": np.int8(3)})])
def test_shares_in_other_forms_are_the_same(forms: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter("ab")
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))

    def step(runtime: Runtime) -> tuple[float, ...]:
        rank, limits = runtime.world.rank, (8, np.array([8, 8]).max())
        shares = Shares(ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID), forms[rank], limits[rank])
        assert shares.first.limits == (8, 8)
        return tuple(sorted(shares.first.shares))
    assert threads(2, step) == [(1.5 if isinstance(forms[0], dict) else 1.0, 3.0)] * 2


def test_shares_by_host_and_limits() -> None:
    def step(runtime: Runtime) -> list[int]:
        shares = Shares(ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID), {socket.gethostname(): 2.5}, [3, 9])
        own = shares.begin().own(10)
        return [own.start, own.stop]
    assert threads(2, step) == [[0, 3], [3, 10]]


@pytest.mark.parametrize("prefetched", [0, 3, 70])
def test_ranks_decide_alike_for_batches_that_are_made_early(prefetched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 needs three times as long for a row; passes end after 30 to 170 batches, and some that were made are left."""
    clocks = dict.fromkeys(range(3), 0.0)
    monkeypatch.setattr(module.Shares, "clock", lambda self: clocks[self._replicas.replica_id])

    def step(runtime: Runtime) -> list[int]:
        rank = runtime.world.rank
        shares, used = Shares(ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID), "auto"), []
        for length in (170, 30, 100):
            current, made = shares.begin(prefetched), list[slice]()
            for index in range(length):
                while len(made) <= index + prefetched:
                    made.append(current.own(70))
                rows = made[index].stop - made[index].start
                assert rows == current.weight(70) * 70 / 3
                clocks[rank] += [1.0, 1.0, 3.0][rank] * rows
                used.append(rows)
                current.finished()
        return used
    everywhere = list(zip(*threads(3, step), strict=True))
    assert all(sum(rows) == 70 for rows in everywhere)
    first = EVERY + prefetched + AHEAD
    assert set(everywhere[:first]) == {(24, 23, 23)} and set(everywhere[-10:]) == {(30, 30, 10)}
    assert everywhere[first] != everywhere[0]


class Interrupted:
    """A handle whose first wait is interrupted."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._errors = handle, [KeyboardInterrupt()]

    def wait(self) -> Any:
        if self._errors:
            raise self._errors.pop()
        return self._handle.wait()


def test_an_interrupted_wait_loses_no_decision() -> None:
    def step(runtime: Runtime) -> list[int]:
        rank = runtime.world.rank
        shares: Any = Shares(ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID), "auto")
        current = shares.begin()
        for _ in range(EVERY):
            shares.finished(1, [1.0, 3.0][rank] * 8, 8)
        if rank == 1:
            shares._begun[0] = Interrupted(shares._begun[0])
            with pytest.raises(KeyboardInterrupt):
                shares.at(EVERY, current)
        owns = [shares.at(number, current).own(16) for number in (EVERY - 1, EVERY)]
        return [own.stop - own.start for own in owns]
    assert threads(2, step) == [[8, 12], [8, 4]]


def test_a_maker_ahead_waits_for_the_decision_or_the_end_of_its_pass() -> None:
    def step(runtime: Runtime) -> int:
        shares = Shares(ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID), "auto")
        current, made = shares.begin(), list[slice]()
        maker = threading.Thread(target=lambda: made.extend(current.own(64) for _ in range(3 * EVERY)))
        maker.start()
        for _ in range(EVERY + 1):
            current.finished()
        current.end()
        maker.join()
        return len(made)
    assert threads(2, step) == [3 * EVERY] * 2
