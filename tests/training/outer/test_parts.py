"""The parts of `training.outer` without ranks, and its exchange on ranks as threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.core.array import Array
from hvdlite.core.process_set import ProcessSet
from hvdlite.core.world import Hosts
from hvdlite.groups.group import Group
from hvdlite.training.outer.codec import BLOCK, Exact, Int8
from hvdlite.training.outer.exchange import Exchange, Round
from hvdlite.training.outer.fragment import Errors
from hvdlite.training.outer.schedule import Schedule, divide
from hvdlite.training.outer.settings import DiLoCo, LocalSGD
from tests.groups.worlds import groups, play

HOSTS = Hosts(((0, 1), (2, 3, 4)))


def registered(*ranks: int) -> ProcessSet:
    made = ProcessSet(ranks)
    made.register(7, 0)
    return made


@pytest.mark.parametrize("arguments", [
    {"every": 0}, {"every": 2.5}, {"every": True}, {"fragments": 0}, {"delay": -1}, {"delay": 10}, {"merge": "add"},
    {"merge": 1.0}, {"merge": -0.1}, {"lr": 0.0}, {"lr": float("nan")}, {"momentum": 1.0}, {"wire": "int4"},
    {"workers": "rack"}, {"workers": [[0, 1]]}])
def test_arguments(arguments: dict[str, Any]) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=f"outer: {name} must be .* not {value!r}".replace("[", r"\[").replace("]", r"\]")):
        DiLoCo(**{"every": 10, **arguments})


def test_local_sgd_is_diloco() -> None:
    assert LocalSGD(8) == DiLoCo(8, fragments=1, delay=0, lr=1.0, momentum=0.0, nesterov=False, wire=None)


def test_workers() -> None:
    assert DiLoCo(10).ranks_of_workers(HOSTS) == ((0, 1), (2, 3, 4))
    assert DiLoCo(10, workers="rank").ranks_of_workers(HOSTS) == ((0,), (1,), (2,), (3,), (4,))
    sets = [registered(3, 1), registered(0, 2, 4)]
    assert DiLoCo(10, workers=sets).ranks_of_workers(HOSTS) == ((0, 2, 4), (1, 3))
    for wrong in ([registered(0, 1)], [registered(0, 1, 2), registered(2, 3, 4)], [ProcessSet(range(5))]):
        with pytest.raises(ValueError, match="must be registered process sets"):
            DiLoCo(10, workers=wrong).ranks_of_workers(HOSTS)


@pytest.mark.parametrize(("every", "fragments", "delay"), [(10, 4, 0), (10, 4, 3), (12, 3, 11), (3, 5, 2), (1, 1, 0)])
def test_each_fragment_is_exchanged_once_in_a_period(every: int, fragments: int, delay: int) -> None:
    schedule = Schedule(every, fragments, delay)
    merged = [(step + delay, fragment) for step in range(1, 5 * every + 1) for fragment in schedule.beginning(step)]
    for fragment in range(fragments):
        steps = [step for step, other in merged if other == fragment]
        assert len(steps) == 5 and set(np.diff(steps)) == {every}
        assert all(step % every == fragment * every // fragments for step in steps)


def test_a_shorter_delay_moves_the_begins_only() -> None:
    schedule, merged, under_way = Schedule(12, 3, 0), [], {}
    schedule.delay = schedule.longest_delay
    assert schedule.delay == 3
    for step in range(1, 50):
        under_way.update((fragment, step + schedule.delay) for fragment in schedule.beginning(step))
        merged += [(step, fragment) for fragment, due in under_way.items() if due == step]
        if step == 12:
            schedule.delay = 1
    assert merged == [(step, step % 12 // 4) for step in range(4, 50, 4)]


@pytest.mark.parametrize("sizes", [[10] * 12, [1000, 1, 1, 1], [0, 0], [5], [3, 0, 400, 2, 80, 90, 1000, 7]])
def test_fragments_are_neighbours_of_about_equal_size(sizes: list[int]) -> None:
    for fragments in range(1, 6):
        parts = divide(sizes, fragments)
        assert [index for part in parts for index in part] == list(range(len(sizes)))
        assert len(parts) <= fragments
        assert max(sum(sizes[index] for index in part) for part in parts) <= sum(sizes) / fragments + max(sizes)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_codecs(dtype: str) -> None:
    draw = np.random.default_rng(1)
    sizes = np.array([[1.0], [1e-30], [0.0], [1e30], [1e-44], [1.0]], dtype)
    blocks = draw.standard_normal((6, BLOCK)).astype(dtype) * sizes
    blocks[5, 7] = np.nan
    for codec in (Exact(np.dtype(dtype)), Int8(np.dtype(dtype))):
        rows = np.empty((blocks.size // codec.values, codec.nbytes), np.uint8)
        codec.encode(blocks.reshape(-1), rows)
        found = codec.decode(rows).reshape(blocks.shape)
        assert found.dtype == blocks.dtype
        if codec.is_exact:
            assert np.array_equal(found, blocks, equal_nan=True)
            continue
        assert np.isnan(found[5]).all(), "a row with a value that is not finite has none"
        bound = np.abs(blocks[:5]).max(axis=1, keepdims=True) / 250
        assert (np.abs(found - blocks)[:4] <= bound[:4]).all()
        assert np.isfinite(found[4]).all() and (found[2] == 0).all()


def exchanged(workers: int, rounds: int, *, keeps_errors: bool) -> float:
    """Return the largest difference between what was applied in random rounds, with what is left, and what was sent."""
    size = 3 * BLOCK + 100
    draws = [np.random.default_rng(worker) for worker in range(workers)]

    def step(group: Group) -> tuple[Array, Array, Errors]:
        exchange = Exchange(workers, 1, "int8", group, None)
        errors, sent, applied = None, np.zeros(size), np.zeros(size)
        for number in range(rounds):
            change = draws[group.rank].standard_normal(size).astype(np.float32)
            sent += change
            round_ = Round(exchange, f"round {number}", change, errors)
            applied += round_.finish()
            errors = round_.errors if keeps_errors else None
        assert round_.errors is not None
        return applied, sent, round_.errors

    results = play(groups(workers), step)
    applied = results[0][0]
    assert all(np.array_equal(other, applied) for other, _, _ in results)
    left = np.mean([errors.change for _, _, errors in results], axis=0) + np.concatenate(
        [errors.mean for _, _, errors in results])
    return float(np.abs(applied + left[:size] - np.mean([sent for _, sent, _ in results], axis=0)).max())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_nothing_is_lost_by_rounding(workers: int) -> None:
    """Over many rounds; the difference is that of float32 sums."""
    assert exchanged(workers, 1000 if workers == 2 else 100, keeps_errors=True) < 1e-5
    assert exchanged(workers, 100, keeps_errors=False) > 1e-2
