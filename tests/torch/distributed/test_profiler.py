"""Process groups under `torch.profiler`."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import profile

from tests.torch.distributed.test_operations import options
from tests.torch.distributed.threads import run


def test_operations_have_spans() -> None:
    def step(group: Any) -> None:
        mine = torch.ones(2)
        with profile() as profiled:
            group.allreduce([mine], options(torch.distributed.AllreduceOptions, asyncOp=False))
            group.broadcast([mine], options(torch.distributed.BroadcastOptions, asyncOp=True)).wait()
        group.barrier().wait()
        found = {event.key: event.count for event in profiled.key_averages()}
        assert found.get("hvdlite:all_reduce") == 1 and found.get("hvdlite:broadcast") == 1, found
        assert "hvdlite:barrier" not in found

    run(1, step)
