"""Programs of test_hosts.py."""

from __future__ import annotations

import os
import platform
import signal
import time
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import api
from hvdlite.planes import gloo
from hvdlite.planes.base import Plan


def collectives() -> tuple[int, int, int, int, bool]:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for name, count in (("small", 3), ("large", 300_000)):
        values = np.arange(count, dtype=np.float32) + rank
        assert np.allclose(hvd.allreduce(values, name=name), np.arange(count) + (size - 1) / 2), name
        assert hvd.broadcast(values, 1, name=f"{name}.b")[0] == 1
        rows = hvd.allgather(np.full((rank + count, 2), rank, np.int32), name=f"{name}.g")
        assert rows.shape == (sum(count + each for each in range(size)), 2) and rows[-1, 0] == size - 1
        parts = hvd.alltoall(np.repeat(np.arange(size), count), name=f"{name}.a")
        assert (parts == rank).all() and parts.size == size * count
        own = hvd.reducescatter(np.ones((size * count, 2)), op=hvd.Sum, name=f"{name}.r")
        assert own.shape == (count, 2) and (own == size).all()
    ends = hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
    if ends.included():
        assert hvd.allreduce(np.full(100_000, rank), op=hvd.Sum, process_set=ends)[0] == size - 1
    assert hvd.remove_process_set(ends) == (size > 2)
    if rank == 0:
        hvd.send(np.arange(70_000), size - 1)
    elif rank == size - 1:
        assert hvd.recv(np.zeros(70_000, int), 0)[-1] == 69_999
    place = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()
    hvd.shutdown()
    return place


def a_blocking_allreduce_travels_with_its_requests() -> None:
    hvd.init()
    plane, planned = api.runtime().connections.plane, []
    execute = plane.execute

    def noted(plan: Plan, *rest: Any) -> None:
        planned.append(plan.response.names)
        execute(plan, *rest)
    plane.execute = noted  # type: ignore[method-assign, assignment]
    values = np.arange(30_000, dtype=np.float32)
    assert (hvd.allreduce(values, op=hvd.Sum, name="waits") == 4 * values).all()
    assert not planned
    assert (hvd.synchronize(hvd.allreduce_async(values, op=hvd.Sum, name="does not")) == 4 * values).all()
    assert planned == [("does not",)]
    assert (hvd.allreduce(np.repeat(values, 2), op=hvd.Sum, name="large") == 4 * np.repeat(values, 2)).all()
    assert planned[1:] == [("large",)]
    hvd.shutdown()


def collectives_where_stores_are_reordered() -> None:
    platform.machine = lambda: "aarch64"
    collectives()


def endless() -> None:
    hvd.init()
    values = np.ones(400_000, np.float32)
    for step in range(10**9):
        hvd.allreduce(values, name="x")
        if step == 3:
            print("moving")


def a_death_in_a_large_exchange() -> None:
    """Rank 1 dies when the other ranks have begun to exchange data with each other."""
    hvd.init()
    values = np.ones(24 << 20, np.float32)
    hvd.alltoall(values[:3])
    if hvd.rank() == 1:
        def die(*_: object) -> None:
            time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        gloo.GlooProcessGroup.alltoall = die  # type: ignore[method-assign, assignment]
    hvd.alltoall(values)


def an_exception_on_another_host_is_everybodys_cause(victim: int) -> None:
    hvd.init()
    for step in range(10**9):
        hvd.allreduce(np.ones(40_000), name="x")
        if step == 5 and hvd.rank() == victim:
            raise KeyError("no such column")


def a_leader_that_leaves_first_still_speaks_for_its_host() -> None:
    hvd.init()
    others = hvd.add_process_set([0, 1, 3])
    hvd.barrier()
    if hvd.rank() != 2:
        for step in range(20):
            assert hvd.allreduce(np.full(100, step), op=hvd.Sum, process_set=others)[0] == 3 * step
    hvd.shutdown()


def the_stall_report_names_the_one_whom_a_host_waits_for() -> None:
    import torch

    import hvdlite_torch as hvd

    hvd.init()
    model = torch.nn.Linear(30, 40)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(6):
        if step == 5 and hvd.rank() == 3:
            time.sleep(600)
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()


def gloo_leaves_the_scripts_own_process_group_alone(store: str) -> None:
    import torch
    import torch.distributed as dist

    hvd.init()
    assert not dist.is_initialized()
    assert hvd.allreduce(np.full(100_000, hvd.rank()), op=hvd.Sum)[0] == 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=hvd.rank(), world_size=2)
    mine = torch.ones(1000)
    for step in range(20):
        dist.all_reduce(mine)
        assert hvd.allreduce(np.full(100_000, step), op=hvd.Sum, name="x")[0] == 2 * step
    assert mine[0] == 2.0 ** 20
    hvd.shutdown()
    dist.all_reduce(mine)
    dist.destroy_process_group()


def training_between_hosts_gives_the_same_parameters() -> float:
    import torch

    import hvdlite_torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                         compression=hvd.Compression.bf16)
    for _step in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    total = sum(float(parameter.double().sum()) for parameter in model.parameters())
    assert len(set(hvd.allgather_object(total))) == 1
    hvd.shutdown()
    return total


def zero_seconds_are_never() -> None:
    hvd.init()
    for _ in range(3):
        assert hvd.allreduce(np.full(100_000, 2.0 + hvd.rank()))[0] == 2.5
    hvd.shutdown()
