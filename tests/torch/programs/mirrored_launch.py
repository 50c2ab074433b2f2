"""A script that trains alone, and launches ranks that train."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import hvdlite_torch as hvd


def main(strategy: Any, start: float) -> Any:
    torch.set_num_threads(1)
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, in strategy.distribute([(torch.arange(6.0).reshape(3, 2) + start,)]):
        model(x).mean().backward()
        optimizer.step()
    return strategy.num_replicas_in_sync, strategy.reduce("SUM", hvd.rank()), model.weight.tolist()


if __name__ == "__main__":
    strategy = hvd.MirroredStrategy(devices=2)
    assert strategy.num_replicas_in_sync == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = main(strategy, start=1.0)
    assert "hvdrun -np 2" in str(caught[0].message)
    assert first[:2] == (1, 0)
    assert strategy.launch(main, (strategy,), {"start": 1.0})[:2] == (2, 1)
    assert hvd.MirroredStrategy().launch(main, (hvd.MirroredStrategy(), 1.0))[:2] == (1, 0)
    print("fine")
