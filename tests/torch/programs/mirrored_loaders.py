"""Programs of test_mirrored_loaders.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import hvdlite_torch as hvd
from tests.torch.mirroring import Normal, assert_close, dataset, train, weights


class Squares(Dataset):
    def __init__(self, length: int) -> None:
        self.length, self.loaded = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return {"number": index, "square": torch.tensor([index ** 2]), "name": f"sample {index}"}


class Stream(IterableDataset):
    """Workers take turns, as documented by torch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.length, step):
            yield {"number": index, "square": torch.tensor([index ** 2]), "name": f"sample {index}"}


def workers_streams_and_synchronised_batch_norm_in_processes() -> None:
    torch.set_num_threads(1)
    strategy = hvd.MirroredStrategy(sync_batch_norm=True)
    rank = hvd.rank()

    for workers in (1, 2 + rank):  # ranks may have different numbers of workers
        own = DataLoader(Squares(41), 4, shuffle=True, num_workers=workers, persistent_workers=True)
        loader = strategy.distribute(own)
        orders = []
        for _epoch in range(2):
            shares = [batch["number"] for batch in loader]
            assert len(shares) == 11
            orders.append(strategy.gather(torch.cat(shares)).tolist())
            assert len(orders[-1]) == 42 and set(orders[-1]) == set(range(41))  # 41 = 10 * 4 + 1: a row for both
        assert orders[0] != orders[1]
        del loader, own
    stream = strategy.distribute(DataLoader(Stream(41), 5, num_workers=2, prefetch_factor=3))
    for _epoch in range(2):
        seen = [number for batch in stream for number in strategy.gather(batch["number"]).tolist()]
        assert sorted(seen) == list(range(41)), seen
    try:
        list(strategy.distribute(DataLoader(Stream(41), 5, num_workers=rank)))
    except hvd.MismatchError as error:
        assert "'workers': 0" in str(error) and "'workers': 1" in str(error), error
    else:
        raise SystemExit("streams of different workers are different")

    with strategy.scope():
        model: Any = Normal(rank)
        bare: Any = torch.nn.BatchNorm1d(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert type(model.norm) is hvd.SyncBatchNorm and type(bare) is hvd.SyncBatchNorm
    curve = train(model, optimizer, strategy.distribute(DataLoader(dataset(37), 8)), 5, False,
                  lambda loss: strategy.reduce("MEAN", loss))
    alone = Normal(0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    expected = train(alone, plain, DataLoader(dataset(37), 8), 5, False)
    assert len(curve) == 25
    assert max(abs(mine - theirs) for mine, theirs in zip(curve, expected, strict=True)) < 1e-4, (curve, expected)
    torch.testing.assert_close(model.norm.running_var, alone.norm.running_var, rtol=1e-4, atol=1e-5)
    assert_close(weights(model), weights(alone))
