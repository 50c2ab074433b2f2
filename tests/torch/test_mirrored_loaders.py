"""What `strategy.distribute` shares out: every sample once an epoch; and results of all ranks' shares together."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.core.process_set import ProcessSet  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite.training.objects import allgather_object  # noqa: E402
from tests.torch.mirroring import (  # noqa: E402
    Net,
    dataset,
    strategy_on,
    train,
    weights,
)
from tests.torch.programs import mirrored_loaders as programs  # noqa: E402
from tests.torch.programs.mirrored_loaders import Squares, Stream  # noqa: E402
from tests.worlds import TORCH, processes, threads  # noqa: E402

Pair = namedtuple("Pair", ["x", "y"])


class Reversed(Sampler):
    """A sampler with randomness of its own, of which nobody knows."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.random = length, np.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(self.length).tolist())

    def __len__(self) -> int:
        return self.length


def block(numbers: Any) -> dict[str, Any]:
    return {"number": numbers, "square": (numbers ** 2)[:, None], "name": [f"sample {each}" for each in numbers.tolist()]}


class Blocks(IterableDataset):
    """An iterable dataset whose items are batches."""

    def __iter__(self) -> Iterator[Any]:
        for begin in range(0, 37, 8):
            yield block(torch.arange(begin, min(37, begin + 8)))


class BlocksByIndex(Dataset):
    """A map-style dataset whose items are batches."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return list(Blocks())[index]


class SquaresByList(Squares):
    """A dataset that is asked for a whole batch of samples at once."""

    def __getitem__(self, index: Any) -> Any:
        self.loaded += len(index)
        return block(torch.tensor(index))


LOADERS: dict[str, Callable[[int], Any]] = {
    "sequential": lambda rank: DataLoader(Squares(37), 8),
    "shuffled": lambda rank: DataLoader(Squares(37), 8, shuffle=True, generator=torch.Generator().manual_seed(rank)),
    "drop_last": lambda rank: DataLoader(Squares(37), 8, shuffle=True, drop_last=True,
                                         generator=torch.Generator().manual_seed(rank)),
    "own sampler": lambda rank: DataLoader(Squares(37), 8, sampler=Reversed(37, rank)),
    "own batch sampler": lambda rank: DataLoader(Squares(37), batch_sampler=BatchSampler(Reversed(37, rank), 10, False)),
    "lists of indices": lambda rank: DataLoader(SquaresByList(37), batch_size=None,
                                                sampler=BatchSampler(Reversed(37, rank), 8, False)),
    "batches by index": lambda rank: DataLoader(BlocksByIndex(), batch_size=None, shuffle=True,
                                                generator=torch.Generator().manual_seed(rank)),
    "stream": lambda rank: DataLoader(Stream(37), 8),
    "stream of batches": lambda rank: DataLoader(Blocks(), batch_size=None),
    "list": lambda rank: list(Blocks()),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_every_sample_once_an_epoch(kind: str, size: int) -> None:
    def step(runtime: Runtime) -> list[list[list[int]]]:
        strategy = strategy_on(runtime)
        own = LOADERS[kind](runtime.world.rank)
        loader = strategy.distribute(own)
        assert strategy.distribute(loader) is loader
        epochs = []
        for _ in range(3):
            shares = []
            for batch in loader:
                numbers = batch["number"].tolist()
                assert batch["square"].tolist() == [[number ** 2] for number in numbers]
                assert batch["name"] == [f"sample {number}" for number in numbers]
                assert sorted(strategy.gather(batch["number"]).tolist()) == sorted(
                    {each for theirs in allgather_object(runtime, numbers, "test") for each in theirs})
                shares.append(numbers)
            assert len(shares) == len(own) if not isinstance(getattr(own, "dataset", None), IterableDataset) else True
            epochs.append(shares)
        if isinstance(getattr(own, "dataset", None), Squares):
            loaded = sum(len(numbers) for shares in epochs for numbers in shares)
            assert own.dataset.loaded == loaded, "a rank loads its share only"
        return epochs

    ranks = threads(size, step)
    orders = []
    for epoch in range(3):
        shares = [rank[epoch] for rank in ranks]
        assert all(len(parts[0]) - len(parts[-1]) in (0, 1) for parts in zip(*shares, strict=True))
        seen = [number for parts in zip(*shares, strict=True) for part in parts for number in part]
        expected = 32 if kind == "drop_last" else 37
        assert len(seen) == len(set(seen)) == expected
        orders.append(seen)
    shuffles = kind in ("shuffled", "drop_last", "own sampler", "own batch sampler", "lists of indices", "batches by index")
    assert (orders[0] != orders[1] != orders[2]) == shuffles


def test_samplers_without_an_end_and_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.training.mirrored.synchronized_sampler.CHUNK", 20)

    class Endless(Sampler):
        def __iter__(self) -> Iterator[int]:
            generator = torch.Generator().manual_seed(1)
            while True:
                yield int(torch.randint(37, (), generator=generator))

    def step(runtime: Runtime) -> list[list[int]]:
        strategy = strategy_on(runtime)
        shares = []
        for batch in strategy.distribute(DataLoader(Squares(37), 8, sampler=Endless())):
            shares.append(batch["number"].tolist())
            if len(shares) == 50:
                break
        assert strategy.weight == 1
        return shares

    expected = list(zip(range(50), DataLoader(Squares(37), 8, sampler=Endless()), strict=False))
    for (_, batch), first, second in zip(expected, *threads(2, step), strict=True):
        assert batch["number"].tolist() == first + second


def test_a_generator_is_used_as_in_one_process() -> None:
    """So a script that shuffles with the global generator has the order that it has without a strategy."""
    def numbers(loader: Any) -> list[list[int]]:
        return [batch["number"].tolist() for _ in range(2) for batch in loader]

    generator = torch.Generator().manual_seed(3)
    expected = numbers(DataLoader(Squares(37), 8, shuffle=True, generator=generator))
    state = generator.get_state()

    def step(runtime: Runtime) -> list[list[int]]:
        own = torch.Generator().manual_seed(3)
        strategy = strategy_on(runtime)
        shares = numbers(strategy.distribute(DataLoader(Squares(37), 8, shuffle=True, generator=own)))
        assert torch.equal(own.get_state(), state), "on every rank"
        return shares
    first, second = threads(2, step)
    assert [one + two for one, two in zip(first, second, strict=True)] == expected


def test_loaders_that_cannot_be_shared_say_so() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        strategy = strategy_on(runtime)
        with pytest.raises(ValueError, match="DistributedSampler already splits the samples"):
            strategy.distribute(DataLoader(Squares(8), 2, sampler=DistributedSampler(Squares(8), 2, rank)))
        with pytest.raises(MismatchError, match=r"replica 0 has .*'samples': 8.* replica 1 .*'samples': 9"):
            next(iter(strategy.distribute(DataLoader(Squares(8 + rank), 2))))
        with pytest.raises(TypeError, match="no tensor in it"):
            next(iter(strategy.distribute([object()])))
        with pytest.raises(ValueError, match="of 4 and of 3 rows"):
            next(iter(strategy.distribute([(torch.ones(4), torch.ones(3))])))

        class Failing(Sampler):
            def __iter__(self) -> Iterator[int]:
                yield 1
                if rank == 0:
                    raise OSError("no more")
                yield 2
        with pytest.raises(Exception, match="no more") as caught:
            next(iter(strategy.distribute(DataLoader(Squares(8), 2, sampler=Failing()))))
        assert isinstance(caught.value, OSError) == (rank == 0)
    threads(2, step)


def test_structures_keep_their_types() -> None:
    def step(runtime: Runtime) -> None:
        strategy = strategy_on(runtime)
        others = {"array": np.arange(4), "names": ["a", "b", "c", "d"], "scale": torch.tensor(2.0), "k": 3}
        batch = Pair(torch.arange(4), others)
        (mine,) = strategy.distribute([batch])
        begin = 2 * runtime.world.rank
        assert isinstance(mine, Pair) and mine.x.tolist() == [begin, begin + 1]
        assert mine.y["array"].tolist() == [begin, begin + 1] and mine.y["names"] == ["abcd"[begin], "abcd"[begin + 1]]
        assert mine.y["scale"] == 2 and mine.y["k"] == 3
    threads(2, step)


# --- reduce and gather -------------------------------------------------------------------------------------------------


def test_reduce_and_gather() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        strategy = strategy_on(runtime)
        assert strategy.num_replicas_in_sync == 3
        assert strategy.reduce("SUM", torch.tensor(rank)) == 3 and strategy.reduce("mean", rank) == 1.0
        both = strategy.reduce(ReduceOp.MAX, {"a": [torch.tensor([rank, -rank])], "b": (float(rank),)})
        assert both["a"][0].tolist() == [2, 0] and both["b"] == (2.0,)
        for number in (16777217, 16777217.0):  # float32 has no such number
            assert strategy.reduce("SUM", number) == 3 * number and strategy.reduce("MEAN", number) == number
        uneven = torch.arange(float(rank + 1))[:, None].expand(-1, 2)  # [0], [0, 1], [0, 1, 2]
        torch.testing.assert_close(strategy.reduce("MEAN", uneven, axis=0), torch.full((2,), 4 / 6))
        torch.testing.assert_close(strategy.reduce("SUM", uneven, axis=0), torch.full((2,), 4.0))
        assert strategy.reduce("MEAN", torch.tensor([1, 2]), axis=0) == 1.5
        for op in ("PRODUCE", "MIN"):
            with pytest.raises(ValueError, match="'SUM' or 'MEAN'"):
                strategy.reduce(op, 1)
        with pytest.raises(ValueError, match="over an axis"):
            strategy.reduce(ReduceOp.MAX, torch.ones(2), axis=0)
        assert strategy.gather(torch.full((rank, 1), rank)).tolist() == [[1], [2], [2]]
        assert strategy.gather((torch.full((1, rank), rank).bfloat16(),), axis=1)[0].tolist() == [[1, 2, 2]]
        assert strategy.gather(torch.tensor([rank == 1]), axis=-1).tolist() == [False, True, False]
        with pytest.raises(ValueError, match="scalar"):
            strategy.gather(torch.tensor(1))
        with pytest.raises(MismatchError, match=r"replica 0 has float32 \(1, 1\), replica 1 float32 \(1, 2\)"):
            strategy.gather(torch.ones(1, rank + 1))
        for (x,) in strategy.distribute([(torch.arange(7.0),), (torch.arange(2.0),)]):  # 3 + 2 + 2 rows; all of both rows
            rows = 7 if len(x) != 2 or strategy.weight != 1 else 2
            assert strategy.reduce("SUM", len(x)) == rows
            assert strategy.reduce("SUM", x, axis=0) == sum(range(rows))
            assert strategy.reduce("MEAN", x.mean()) == pytest.approx((rows - 1) / 2)
            assert strategy.reduce("MEAN", x, axis=0) == pytest.approx((rows - 1) / 2)
            assert strategy.gather(x).tolist() == list(range(rows))
    threads(3, step)


def test_ranks_outside_of_the_process_set_have_one_replica() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        pair = ProcessSet([0, 2])
        pair.register(runtime.add_process_set((0, 2)).wait(), rank)
        strategy = strategy_on(runtime, process_set=pair)
        with strategy.scope():
            model = Net(seed=rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert strategy.num_replicas_in_sync == (1 if rank == 1 else 2)
        start = weights(Net(seed=1 if rank == 1 else 0))
        assert all(torch.equal(mine, other) for mine, other in zip(weights(model), start, strict=True))
        rows = [len(x) for x, _ in strategy.distribute(DataLoader(dataset(10), 4))]
        assert rows == ([4, 4, 2] if rank == 1 else [2, 2, 1])
        train(model, optimizer, strategy.distribute(DataLoader(dataset(10), 4)), 2, clip=False)
        assert strategy.reduce("SUM", rank) == (1 if rank == 1 else 2)
    threads(3, step)


def test_workers_streams_and_synchronised_batch_norm_in_processes() -> None:
    processes(2, programs.workers_streams_and_synchronised_batch_norm_in_processes, timeout=150, imported=TORCH)
