"""The rest of an epoch: every sample once, over any restarts."""

from __future__ import annotations

import collections
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.training.positions import batches, rank_share


@settings(deadline=None, max_examples=200)
@given(length=st.integers(1, 60), drops=st.booleans(),
       worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 6)), max_size=5))
def test_every_sample_once_over_any_restarts(length: int, drops: bool, worlds: list[tuple[int, int, int]]) -> None:
    order = [(7 * each) % 61 for each in range(length)]
    consumed, seen = 0, collections.Counter[int]()
    for size, count, batch in [*worlds, (3, length, 2)]:
        cut = [list(batches(rank_share(order, consumed, rank, size, drops=drops), batch)) for rank in range(size)]
        assert len({tuple(map(len, own)) for own in cut}) == 1, "all ranks make the same steps"
        for step in itertools.islice(zip(*cut, strict=True), count):
            seen.update(itertools.chain(*step))
            consumed = min(consumed + sum(map(len, step)), length)
    last = max(size for size, *_ in [*worlds, (3, 0, 0)])
    missing = [each for each in order if each not in seen]
    assert len(missing) < last if drops else not missing
    assert sum(seen.values()) - len(seen) < last, "only the end is padded"


def test_a_last_batch_is_shorter_or_dropped() -> None:
    assert [list(each) for each in batches(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [list(each) for each in batches(range(7), 3, drops=True)] == [[0, 1, 2], [3, 4, 5]]
    assert rank_share([5, 6], 0, 3, 5) == [6] and rank_share([5, 6], 2, 0, 5) == []
