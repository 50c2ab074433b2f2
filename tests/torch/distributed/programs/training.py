"""Trainings with what builds on `torch.distributed`; each returns values that have to be equal on all ranks."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdlite_torch.distributed  # noqa: F401
from tests.torch.distributed.programs.ranks import RANK, begin

STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def flat(model: nn.Module) -> torch.Tensor:
    whole = [parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter for parameter in model.parameters()]
    return torch.cat([parameter.detach().reshape(-1) for parameter in whole])


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, same_data: bool = False) -> torch.Tensor:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0 if same_data else RANK)
    for _ in range(STEPS):
        inputs, labels = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), labels).backward()
        optimizer.step()
    return flat(model)


def ddp(**settings: Any) -> torch.Tensor:
    return train(DistributedDataParallel(network(), bucket_cap_mb=0.0005, **settings))


def unused_parameters() -> torch.Tensor:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = network(), nn.Linear(8, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.always(inputs) + (0 if RANK else self.sometimes(inputs))

    return train(DistributedDataParallel(Sometimes(), find_unused_parameters=True))


def with_hook(hook: str) -> torch.Tensor:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = DistributedDataParallel(network())
    if hook == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    return train(model)


def uneven_inputs() -> torch.Tensor:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for _ in range(2 + RANK):
            optimizer.zero_grad()
            model(torch.ones(4, 8) * (RANK + 1)).sum().backward()
            optimizer.step()
    return flat(model)


def no_sync() -> torch.Tensor:
    model = DistributedDataParallel(network())
    with model.no_sync():
        model(torch.ones(4, 8) * (RANK + 1)).sum().backward()
    model(torch.ones(4, 8) * (RANK + 2)).sum().backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])


def sparse_gradients() -> torch.Tensor:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.tensor([RANK, 3, RANK + step])).sum().backward()
        optimizer.step()
    return flat(model)


def zero() -> torch.Tensor:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=True)
    return train(model, optimizer)


def sharded() -> torch.Tensor:
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return train(fully_shard(model))


def sharded_narrow() -> torch.Tensor:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(fully_shard(network(), mp_policy=policy))


def sharded_by_fsdp1() -> torch.Tensor:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return flat(model)


def tensor_parallel() -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return train(parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), same_data=True)


def sequence_parallel() -> torch.Tensor:
    """Ranks have parts of the sequences between layers, and of the features inside."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)),
                                     "3": RowwiseParallel(output_layouts=Shard(1))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        inputs, labels = (torch.randn(4, 6, 8, generator=generator).chunk(size, 1)[RANK] for _ in range(2))
        optimizer.zero_grad()
        F.mse_loss(model(inputs), labels).backward()
        optimizer.step()
    return flat(model)


def pipeline(schedule: str) -> torch.Tensor:
    """Each rank has some of the layers; parts of a batch go through them one behind the other."""
    from torch.distributed import pipelining

    layers, size = list(network()), dist.get_world_size()
    own = nn.Sequential(*layers[RANK * len(layers) // size:(RANK + 1) * len(layers) // size])
    stage = pipelining.PipelineStage(own, RANK, size, torch.device("cpu"))
    schedules = getattr(pipelining, f"Schedule{schedule}")(stage, n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        inputs, labels = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        schedules.step(*[inputs] * (RANK == 0), **{"target": labels} if size - RANK == 1 else {})
        optimizer.step()
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, flat(own))
    return torch.cat(parts)


def checkpoint() -> torch.Tensor:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(network())
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = make()
    expected = train(model, optimizer)
    folder = [tempfile.mkdtemp(dir=os.environ["FOLDER"])] if RANK == 0 else [""]
    dist.broadcast_object_list(folder, 0)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder[0])
    model, optimizer = make()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert torch.equal(flat(model), expected)
    return expected


def functional() -> torch.Tensor:
    import torch.distributed._functional_collectives as functional

    world, size = dist.group.WORLD, dist.get_world_size()
    mine = torch.arange(2.0 * size) + RANK
    results = [
        functional.all_reduce(mine, "sum", world), functional.all_gather_tensor(mine, 0, world),
        functional.broadcast(mine, 1, world), *functional.all_reduce_coalesced([mine, mine * 2], "max", world),
        *functional.all_gather_into_tensor_coalesced([mine, mine[:3]], world),
        functional.all_gather_tensor(functional.reduce_scatter_tensor(mine, "sum", 0, world), 0, world),
        functional.all_gather_tensor(functional.all_to_all_single(mine, None, None, world), 0, world),
        functional.all_gather_tensor(functional.reduce_scatter_tensor_coalesced([mine], "sum", [0], world)[0], 0, world)]
    return torch.cat([result.reshape(-1) for result in results])


def compiled(backend: str, finish: Callable[[torch.Tensor], torch.Tensor] = torch.t) -> torch.Tensor:
    import torch.distributed._functional_collectives as functional

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=os.environ["FOLDER"])
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that compile

    @torch.compile(fullgraph=True, backend=backend)
    def step(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        summed = functional.all_reduce(inputs @ weights, "sum", dist.group.WORLD)
        gathered = functional.all_gather_tensor(summed, 0, dist.group.WORLD)
        dist.all_reduce(gathered)
        return finish(gathered @ weights)

    return step(torch.ones(4, 4) * (RANK + 1), torch.eye(4))


def pending() -> torch.Tensor:
    """A result of a functional collective that nobody has waited for."""
    import torch.distributed._functional_collectives as functional

    summed = functional.all_reduce(torch.ones(4) * (RANK + 1), "sum", dist.group.WORLD)
    gathered = torch.empty(4 * dist.get_world_size())
    dist.all_gather_into_tensor(gathered, summed)
    dist.all_reduce(summed)
    return torch.cat([summed, gathered])


def compiled_ddp() -> torch.Tensor:
    model: Any = torch.compile(DistributedDataParallel(network()), backend="aot_eager")
    return train(model)


def in_detail() -> torch.Tensor:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return train(DistributedDataParallel(network(), process_group=dist.new_group()))
    finally:
        dist.set_debug_level(level)


CASES: dict[str, Callable[[], torch.Tensor]] = {
    "DDP": ddp, "bucket views": lambda: ddp(gradient_as_bucket_view=True), "static graph": lambda: ddp(static_graph=True),
    "unused parameters": unused_parameters, "fp16 hook": lambda: with_hook("fp16_compress_hook"),
    "hook": lambda: with_hook("allreduce_hook"), "uneven inputs": uneven_inputs, "no_sync": no_sync,
    "sparse gradients": sparse_gradients, "ZeRO": zero, "FSDP2": sharded, "FSDP2 in bfloat16": sharded_narrow,
    "FSDP": sharded_by_fsdp1, "tensor parallel": tensor_parallel, "sequence parallel": sequence_parallel,
    "GPipe": lambda: pipeline("GPipe"), "1F1B": lambda: pipeline("1F1B"), "checkpoint": checkpoint, "functional": functional,
    "compiled": lambda: compiled("inductor" if dist.get_backend() == "hvdlite" else "eager"),
    "pending": pending, "compiled DDP": compiled_ddp, "debug level": in_detail,
}


def trainings(folder: str) -> None:
    """Run every case on hvdlite and on Gloo; the ranks have the same values, and so do the backends."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["FOLDER"] = folder
    results: dict[str, dict[str, torch.Tensor]] = {backend: {} for backend in ("hvdlite", "gloo")}
    for backend, found in results.items():
        begin(folder, backend)
        for name, case in CASES.items():
            if name == "debug level" and backend == "gloo":  # a subgroup of Gloo with this level kills torch 2.13
                continue
            mine = found[name] = copy.deepcopy(case())
            everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everybodys, mine)
            assert all(torch.equal(each, mine) for each in everybodys), f"{name} on {backend}: the ranks differ"
        dist.destroy_process_group()
    for name in results["gloo"]:
        difference = (results["hvdlite"][name] - results["gloo"][name]).abs().max().item()
        assert difference <= 1e-6, f"{name}: {difference} from Gloo's"


def powerSGD(folder: str) -> None:
    """Gloo's result is another one in each run: its threads carry out what callbacks call."""
    begin(folder)
    mine = with_hook("powerSGD")
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    assert all(torch.equal(each, mine) for each in everybodys)
    dist.destroy_process_group()


def compiled_by_inductor(folder: str) -> None:
    """With a kernel, for which inductor needs a C++ compiler."""
    os.environ["FOLDER"] = folder
    begin(folder)
    assert torch.equal(*(compiled(backend, lambda found: found.relu() + 1) for backend in ("inductor", "eager")))
    dist.destroy_process_group()
