"""A rank that trains with the same optimizer in many worlds, which are jobs that follow each other in the same processes."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd
from hvdlite import api
from hvdlite.core import launch_contract
from hvdlite.runtime.runtime import Runtime
from tests.held import join_threads, open_files
from tests.torch.models import by_bucket


def held() -> dict[str, Any]:
    """Return what this process has of a world: open files, mappings of shared memory, threads and runtimes."""
    gc.collect()
    maps = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if len(line.split()) > 5]
    return {"open": open_files(),
            "shared": sum("memfd" in name or "/dev/shm" in name for name in maps),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "runtimes": sum(isinstance(each, Runtime) for each in gc.get_objects())}


def many_worlds(count: int) -> list[dict[str, Any]]:
    """Train in each world until gradients lie in shared memory; return what the second and the last one left."""
    gc.freeze()  # what is imported makes each collection slow
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    hvd.broadcast_parameters(model.state_dict(), 0)
    ways: list[dict[str, Any]] = [{}, {"op": hvd.Adasum}, {"comm_hook": hvd.comm_hooks.PowerSGD(1, 2)}]
    optimizers: list[Any] = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), **way)
                             for way in ways]
    states = []
    for world in range(count):
        if world:
            hvd.init()
        for _ in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
        assert by_bucket(optimizers[0])
        hvd.check_replicas(model.state_dict())
        if world in (1, count - 1):
            states.append(held())
            hvd.barrier()
        hvd.shutdown()
        join_threads()
    api.worlds().followers.world_ended()
    api.worlds().followers.collect()
    return [*states, held()]


def train_elastically(gate: str) -> list[tuple[int, int]]:
    """Train until the file `gate` exists, with optimizers made before the first world; return ranks and sizes."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), hvd.SyncBatchNorm(16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    parts = [list(model[index].parameters()) for index in (0, 1, 3)]
    ways: list[dict[str, Any]] = [{"wait_in": "step"}, {"op": hvd.Adasum}, {"comm_hook": hvd.comm_hooks.PowerSGD(1, 2)}]
    optimizers: list[Any] = [hvd.DistributedOptimizer(torch.optim.SGD(part, lr=0.01, momentum=0.9), **way)
                             for part, way in zip(parts, ways, strict=True)]
    state = hvd.elastic.TorchState(model, step=0, **{f"optimizer{index}": each for index, each in enumerate(optimizers)})
    worlds: list[tuple[int, int]] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        worlds.append((hvd.rank(), hvd.size()))
        own = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))
        done = False
        while not done:
            done = bool(hvd.allreduce(torch.tensor(float(os.path.exists(gate))), op=hvd.Max, name="done"))
            for optimizer in (*optimizers, own):
                optimizer.zero_grad()
            (model(torch.randn(4, 6)).square().mean() + own.param_groups[0]["params"][0].sum()).backward()
            for optimizer in (*optimizers, own):
                optimizer.step()
            state.step += 1
            print(f"trained in world {os.environ.get(launch_contract.EPOCH, '1')}", flush=True)
            state.commit()
    train(state)
    hvd.check_replicas(model.state_dict())
    assert by_bucket(optimizers[0])
    return worlds
