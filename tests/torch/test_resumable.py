"""`hvd.resumable`: a DataLoader goes on at the precise batch, with order and random numbers of an undisturbed run."""

from __future__ import annotations

import collections
import io
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hvdlite import api  # noqa: E402
from hvdlite_torch import resumable  # noqa: E402
from tests.torch.programs.resuming import resume  # noqa: E402
from tests.worlds import TORCH, processes  # noqa: E402


class Numbers(Dataset):
    """Samples that are their own numbers; `loaded` has those that this process has loaded."""

    def __init__(self, length: int) -> None:
        self.length, self.loaded = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.loaded.append(index)
        return index


class Halves(Sampler):
    """Batches of a script's own: random ones of the first half, then of the second."""

    def __init__(self, length: int, batch: int) -> None:
        self.length, self.batch = length, batch

    def __iter__(self) -> Iterator[list[int]]:
        for begin, end in ((0, self.length // 2), (self.length // 2, self.length)):
            order = [begin + each for each in torch.randperm(end - begin).tolist()]
            yield from (order[each:each + self.batch] for each in range(0, len(order), self.batch))

    def __len__(self) -> int:
        return sum(-(-size // self.batch) for size in (self.length // 2, self.length - self.length // 2))


class Hidden(Sampler):
    """Draws from a generator of which nobody knows."""

    def __init__(self, length: int) -> None:
        self.length, self.random = length, random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(self.length), self.length))

    def __len__(self) -> int:
        return self.length


class Records(IterableDataset):
    """A stream that knows its place: the shard, and the offset in it."""

    def __init__(self, shards: int, each: int) -> None:
        self.shards, self.each = shards, each
        self.place = (0, 0)

    def __iter__(self) -> Iterator[int]:
        while self.place[0] < self.shards:
            shard, offset = self.place
            self.place = (shard, offset + 1) if offset + 1 < self.each else (shard + 1, 0)
            yield shard * self.each + offset
        self.place = (0, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"place": list(self.place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = tuple(state["place"])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    of_world(monkeypatch, 0, 1)


def of_world(patch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    patch.setattr(api, "rank", lambda: rank)
    patch.setattr(api, "size", lambda: size)


def flat(batches: Iterable[Any]) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


def saved(loader: Any) -> Any:
    """Return a loader's place as it comes from a file."""
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # plain data


@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 40), shuffle=st.booleans(), drop_last=st.booleans(),
       worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12), st.integers(1, 5)), max_size=5))
def test_a_ledger_has_every_sample_of_every_epoch_once(
        length: int, shuffle: bool, drop_last: bool, worlds: list[tuple[int, int, int]]) -> None:
    """Each world has ranks, makes steps with batches, and ends; the next one has other ranks."""
    epochs, data = 3, Numbers(length)
    ledger: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    state = None
    largest = max([size for size, *_ in worlds], default=1)
    with pytest.MonkeyPatch.context() as patch:
        for size, steps, batch in [*worlds, (1, 1000, 4)]:
            states = []
            for rank in range(size):
                of_world(patch, rank, size)
                sampler = DistributedSampler(data, size, rank, shuffle, seed=5, drop_last=drop_last)
                loader = resumable(DataLoader(data, batch, sampler=sampler))
                if state is not None:
                    loader.load_state_dict(state)
                left = steps
                for epoch in range(loader.epoch, epochs):
                    for numbers in itertools.islice(loader, left):
                        ledger[epoch].update(numbers.tolist())
                        left -= 1
                    if not left:
                        break
                states.append(saved(loader))
            assert len({str(each) for each in states}) == 1, "the place is the same on all ranks"
            state = states[0]
    for epoch in range(epochs):
        seen, extra = ledger[epoch], sum(ledger[epoch].values()) - len(ledger[epoch])
        assert extra < largest and (length - len(seen) < largest if drop_last else len(seen) == length), ledger


def make(kind: str, workers: int = 0, persistent: bool = False) -> DataLoader[Any]:
    data = Numbers(23)
    generator = torch.Generator().manual_seed(3)
    common: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    loaders = {
        "shuffle": lambda: DataLoader(data, 4, shuffle=True, **common),
        "shuffle, drop_last": lambda: DataLoader(data, 4, shuffle=True, drop_last=True, **common),
        "generator": lambda: DataLoader(data, 4, shuffle=True, generator=generator, **common),
        "sequential": lambda: DataLoader(data, 4, **common),
        "one by one": lambda: DataLoader(data, None, shuffle=True, **common),
        "weighted": lambda: DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 22 + [5.0], 40), **common),
        "with replacement": lambda: DataLoader(
            data, 4, sampler=RandomSampler(data, replacement=True, num_samples=50, generator=generator), **common),
        "subset": lambda: DataLoader(data, 4, sampler=SubsetRandomSampler(range(3, 20)), **common),
        "batch sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, True), **common),
        "own batches": lambda: DataLoader(data, batch_sampler=Halves(23, 4), **common),
        "batches as samples": lambda: DataLoader(data, None, sampler=BatchSampler(SequentialSampler(range(4)), 1, False),
                                                 collate_fn=lambda each: each, **common),
        "distributed": lambda: DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0), **common),
    }
    if kind == "batches as samples":
        data = [[index] for index in range(4)]  # type: ignore[assignment]

        class ByList(Dataset):
            def __getitem__(self, index: list[int]) -> list[int]:
                return index

            def __len__(self) -> int:
                return 4
        data = ByList()  # type: ignore[assignment]
    return loaders[kind]()


KINDS = ["shuffle", "shuffle, drop_last", "generator", "sequential", "one by one", "weighted", "with replacement", "subset",
         "batch sampler", "own batches", "batches as samples", "distributed"]


def train(loader: Any, epochs: int, steps: int = 1000) -> list[tuple[int, list[int], float]]:
    """Train for a number of steps; return what each one saw: epoch, samples and a random number."""
    log = []
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            log.append((epoch, torch.as_tensor(batch).flatten().tolist(), torch.rand(()).item()))
            if len(log) == steps:
                return log
    return log


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_as_if_it_had_not_been_disturbed(kind: str) -> None:
    torch.manual_seed(11)
    whole = train(resumable(make(kind)), 3)
    assert len({str(sorted(samples)) for *_, samples, _ in whole}) > 1
    for steps in range(len(whole)):
        torch.manual_seed(11)
        loader = resumable(make(kind))
        begun = train(loader, 3, steps) if steps else []
        state, numbers = saved(loader), torch.get_rng_state()
        torch.manual_seed(99)
        other = resumable(make(kind))
        other.load_state_dict(state)
        torch.set_rng_state(numbers)
        assert begun + train(other, 3) == whole, steps
        assert (other.epoch, len(other)) == (3, len(loader))
        if steps:
            torch.set_rng_state(numbers)
            assert begun + train(loader, 3) == whole, "leaving the loop and beginning it again goes on, too"


@pytest.mark.parametrize("workers", [0, 2])
def test_losses_of_two_ranks_with_dropout_are_those_of_an_undisturbed_run(workers: int) -> None:
    one, other = processes(2, resume, workers, imported=TORCH)
    assert len(one.result) == 12 and one.result != other.result


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_load_nothing_twice_and_what_they_read_ahead_does_not_count(persistent: bool) -> None:
    torch.manual_seed(1)
    whole = [samples for _, samples, _ in train(resumable(make("shuffle")), 3)]
    torch.manual_seed(1)
    loader = resumable(make("shuffle", 2, persistent))
    begun = train(loader, 3, 8)
    other = resumable(make("shuffle", 2, persistent))
    other.load_state_dict(saved(loader))
    assert len(other) == 4 and [samples for _, samples, _ in begun + train(other, 3)] == whole
    assert [samples for _, samples, _ in begun + train(loader, 3)] == whole


def test_what_is_skipped_is_never_loaded_and_the_length_is_what_is_left() -> None:
    data = Numbers(20)
    loader = resumable(DataLoader(data, 3, shuffle=True))
    assert len(loader) == 7 and loader.batch_size == 3
    iterator = iter(loader)
    seen = flat(next(iterator) for _ in range(5))
    assert len(loader) == 7, "of the iteration"
    other_data = Numbers(20)
    other = resumable(DataLoader(other_data, 3, shuffle=True))
    other.load_state_dict(loader.state_dict())
    assert len(other) == 2
    assert sorted(seen + flat(other)) == list(range(20))
    assert len(other_data.loaded) == 5 and (other.epoch, len(other)) == (1, 7)


def test_a_place_counts_samples_so_the_batch_may_change() -> None:
    loader = resumable(DataLoader(Numbers(20), 3, sampler=DistributedSampler(range(20), 1, 0)))
    seen = flat(itertools.islice(loader, 2))
    other = resumable(DataLoader(Numbers(20), 5, sampler=DistributedSampler(range(20), 1, 0)))
    other.load_state_dict(saved(loader))
    assert sorted(seen + flat(other)) == list(range(20))


def test_places_that_do_not_fit_are_refused() -> None:
    def place(loader: DataLoader[Any], steps: int = 2) -> Any:
        loader = resumable(loader)
        train(loader, 1, steps)
        return saved(loader)

    def distributed(length: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(Numbers(length), 3, sampler=DistributedSampler(range(length), 1, 0, **options))

    other = resumable(distributed(20))
    for wrong, text in ((distributed(21), "samples was 21 when it was saved, and is 20 here"),
                        (distributed(20, seed=1), "seed was 1"),
                        (make("generator"), "samples was 23"),
                        (DataLoader(Numbers(20), 3), "sampler was 'SequentialSampler'")):
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(place(wrong))
    other.load_state_dict(place(distributed(20, shuffle=False)))
    with pytest.raises(ValueError, match="gives epoch 0 another order"):
        next(iter(other))
    other.load_state_dict(place(distributed(21), 1000))
    assert other.epoch == 1 and len(other) == 7, "between epochs anything fits"
    hidden = resumable(DataLoader(Numbers(9), 2, sampler=Hidden(9)))
    hidden.load_state_dict(place(DataLoader(Numbers(9), 2, sampler=Hidden(9))))
    list(hidden)  # the same seed: the same order
    train(hidden, 2, 1)
    again = resumable(DataLoader(Numbers(9), 2, sampler=Hidden(9)))
    again.load_state_dict(saved(hidden))
    with pytest.raises(ValueError, match=r"Hidden gives epoch 1 another order.*torch.Generator"):
        next(iter(again))


def test_loaders_whose_place_nobody_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(DataLoader):
        def __iter__(self) -> Any:
            return itertools.cycle(super().__iter__())

    class Every(DistributedSampler):
        """Gives each rank a block."""

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))

    for wrong in ([1, 2], Endless(Numbers(3))):
        with pytest.raises(TypeError, match=r"takes a torch.utils.data.DataLoader"):
            resumable(wrong)
    of_world(monkeypatch, 1, 2)
    for loader in (DataLoader(Numbers(8), 2, shuffle=True), DataLoader(Numbers(8), batch_sampler=Halves(8, 2))):
        with pytest.raises(ValueError, match=r"rank 1 of 2: .*sampler=DistributedSampler\(dataset, num_replicas=hvd.size"):
            resumable(loader)
    with pytest.raises(ValueError, match="among 4 ranks, and the job has 2"):
        resumable(DataLoader(Numbers(8), 2, sampler=DistributedSampler(range(8), 4, 1)))
    with pytest.raises(ValueError, match="rank 1's samples of Every are not every 2th"):
        resumable(DataLoader(Numbers(8), 2, sampler=Every(range(8), 2, 1)))


def test_a_stream_that_knows_its_place_goes_on_with_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    of_world(monkeypatch, 1, 2)
    loader = resumable(DataLoader(Records(3, 5), 4))
    seen = flat(itertools.islice(loader, 2))
    state = saved(loader)
    other = resumable(DataLoader(Records(3, 5), 4))
    other.load_state_dict(state)
    assert seen + flat(other) == list(range(15)) and other.epoch == 1
    assert len(list(other)) == 4
    of_world(monkeypatch, 1, 3)
    with pytest.raises(ValueError, match=r"rank 1 of 3: .*saved by rank 1 of 2"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="iterated in 2 workers"):
        resumable(DataLoader(Records(3, 5), 4, num_workers=2))
    with pytest.raises(TypeError, match="has no state_dict"):
        resumable(DataLoader(type("Stream", (IterableDataset,), {"__iter__": lambda self: iter("ab")})()))
