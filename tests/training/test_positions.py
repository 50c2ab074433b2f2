"""The rest of an epoch: every sample once, over any restarts."""

from __future__ import annotations

import collections
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.training.positions import by_turns, rank_share, refuse_other


@settings(deadline=None, max_examples=200)
@given(length=st.integers(1, 60), drops=st.booleans(),
       worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 6)), max_size=5))
def test_every_sample_once_over_any_restarts(length: int, drops: bool, worlds: list[tuple[int, int, int]]) -> None:
    order = [(7 * each) % 61 for each in range(length)]
    consumed, seen = 0, collections.Counter[int]()
    for size, count, batch in [*worlds, (3, length, 2)]:
        cut = [by_turns(order, consumed, rank, size, batch, drops=drops) for rank in range(size)]
        assert len({tuple((end, len(own)) for end, own in steps) for steps in cut}) == 1, "all ranks make the same steps"
        for step in itertools.islice(zip(*cut, strict=True), count):
            seen.update(itertools.chain(*(own for _, own in step)))
            before, consumed = consumed, step[0][0]
            assert consumed == min(before + sum(len(own) for _, own in step), length)
    last = max(size for size, *_ in [*worlds, (3, 0, 0)])
    missing = [each for each in order if each not in seen]
    assert len(missing) < last if drops else not missing
    assert sum(seen.values()) - len(seen) < last, "only the end is padded"


def test_a_last_batch_is_shorter_or_dropped() -> None:
    whole = [(3, [0, 1, 2]), (6, [3, 4, 5])]
    assert by_turns(range(7), 0, 0, 1, 3) == [*whole, (7, [6])]
    assert by_turns(range(7), 0, 0, 1, 3, drops_batch=True) == whole and by_turns(range(7), 5, 1, 2) == [(7, [6])]
    assert rank_share([5, 6], 0, 3, 5) == [6] and rank_share([5, 6], 2, 0, 5) == []


def test_a_place_fits_the_data_with_which_it_was_saved() -> None:
    place = {"epoch": 1, "consumed": 3, "count": 7}
    refuse_other(place, {"count": 7})
    refuse_other({**place, "consumed": 0}, {"count": 8})
    with pytest.raises(ValueError, match="the place 3 in epoch 1 does not fit these data: count was 7 when"):
        refuse_other(place, {"count": 8})
