"""Programs of test_replicas.py."""

from __future__ import annotations

import torch

import hvdlite_torch as hvd


def the_public_call() -> None:
    hvd.init()
    model = torch.nn.Linear(3, 3)
    try:
        hvd.check_replicas(model.state_dict())
    except hvd.ReplicaMismatchError as error:
        assert "'bias'" in str(error) and "1 of the other 1" in str(error), error
    else:
        raise SystemExit("random weights were the same")
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.check_replicas(model.named_parameters())
