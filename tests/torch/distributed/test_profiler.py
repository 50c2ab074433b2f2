"""Process groups under `torch.profiler` and `CommDebugMode`."""

from __future__ import annotations

from typing import Any

import pytest
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


def test_calls_are_counted() -> None:
    debug = pytest.importorskip("torch.distributed.tensor.debug")

    def step(group: Any) -> None:
        operators, mine = torch.ops.c10d, torch.ones(2)
        with debug.CommDebugMode() as counted:
            group.allreduce([mine]).wait()
            group.allreduce(mine).wait()
            group._allgather_base(torch.empty(2), mine).wait()
            group.barrier().wait()  # not counted with other backends either
        group.allreduce([mine]).wait()
        assert dict(counted.get_comm_counts()) == {operators.allreduce_: 2, operators._allgather_base_: 1}
        table = counted.generate_comm_debug_tracing_table(noise_level=3)
        assert "c10d.allreduce_.default" in table and "c10d.barrier.default" in table

    run(1, step)
