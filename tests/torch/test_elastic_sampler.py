"""`ElasticSampler`: every sample once in an epoch, over any sequence of worlds."""

from __future__ import annotations

import collections
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from hvdlite import api  # noqa: E402
from hvdlite_torch.elastic import ElasticSampler  # noqa: E402


class World:
    """The ranks' samplers of one epoch; the world may change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.samplers: list[ElasticSampler] = []

    def change(self, size: int, length: int, shuffle: bool = True) -> None:
        """Go on with so many ranks: the first have been there before, and rank 0's state goes to all."""
        survivors = self.samplers[:size]
        self.samplers = []
        for rank in range(size):
            self._patch.setattr(api, "rank", lambda rank=rank: rank)
            self._patch.setattr(api, "size", lambda: size)
            own = survivors[rank] if rank < len(survivors) else ElasticSampler(range(length), shuffle)
            self.samplers.append(own)
            own.reset()
            if rank > 0:
                own.load_state_dict(self.samplers[0].state_dict())
        for rank, own in enumerate(self.samplers):
            self._patch.setattr(api, "rank", lambda rank=rank: rank)
            own.set_epoch(own.epoch)  # at the beginning of the epoch, as many scripts do

    def train(self, batches: int | None, batch_size: int) -> list[int]:
        """Process batches on all ranks, as many as there are by default; return their samples."""
        seen = []
        for own in self.samplers:
            iterator = iter(own)
            for index in itertools.count() if batches is None else range(batches):
                batch = list(itertools.islice(iterator, batch_size))
                if not batch:
                    break
                seen += batch
                own.record_batch(index, len(batch))
        return seen


@settings(deadline=None, max_examples=150)
@given(length=st.integers(1, 60), shuffle=st.booleans(),
       worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=5))
def test_every_sample_once_over_any_worlds(length: int, shuffle: bool, worlds: list[tuple[int, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch)
        seen: list[int] = []
        for size, batches, batch_size in worlds:
            world.change(size, length, shuffle)
            seen += world.train(batches, batch_size)
        world.change(3, length, shuffle)
        seen += world.train(None, 2)
    counts = collections.Counter(seen)
    assert sorted(counts) == list(range(length))
    assert len(seen) - length < max(size for size, *_ in [*worlds, (3,)]), "only the end is padded"


def alone(monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 1, shuffle: bool = True) -> ElasticSampler:
    monkeypatch.setattr(api, "rank", lambda: rank)
    monkeypatch.setattr(api, "size", lambda: size)
    return ElasticSampler(range(20), shuffle)


def test_epochs_begin_anew_unless_they_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = alone(monkeypatch)
    sampler.record_batch(0, 4)
    assert sampler.processed_num == 4 and len(sampler) == 20, "what is divided stays divided"
    sampler.set_epoch(0)
    assert sampler.processed_num == 0, "the script repeats the epoch"
    sampler.record_batch(0, 4)
    sampler.load_state_dict(sampler.state_dict())
    sampler.set_epoch(0)
    assert sampler.processed_num == 4 and len(sampler) == 16, "it goes on"
    sampler.set_epoch(0)
    assert sampler.processed_num == 0
    sampler.record_batch(0, 4)
    sampler.reset()
    sampler.set_epoch(1)
    assert (sampler.processed_num, sampler.epoch, len(sampler)) == (0, 1, 20)


def test_indices_can_be_recorded_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = alone(monkeypatch, rank=1, size=2)
    sampler.record_indices(sampler.get_indices(0, 3))
    sampler.record_indices(sorted(sampler.get_indices(1, 3)))
    assert sampler.processed_num == 12
    with pytest.raises(ValueError, match="are not the next 3 of rank 1"):
        sampler.record_indices(sampler.get_indices(0, 3))
    sampler.reset()
    sampler.record_indices(list(sampler)[:4])
    assert sampler.processed_num == 20


def test_an_order_depends_on_seed_and_epoch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = {tuple(ElasticSampler(range(20), seed=seed)) for seed in (0, 0, 1) if alone(monkeypatch)}
    assert len(orders) == 2 and all(sorted(order) == list(range(20)) for order in orders)
    assert list(alone(monkeypatch, shuffle=False)) == list(range(20))
