"""Programs of test_training.py."""

from __future__ import annotations

import os
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import hvdlite_torch as hvd
from benchmarks.gpu_sheet import sharing_alone
from benchmarks.gpu_training import STEPS, is_wait, names_within
from tests.gpu.programs.support import batches, begin, net, same_everywhere, step
from tests.torch.models import has_learned


def two_ranks_equal_one(variants: list[str], views: bool) -> None:
    rank, size, gpu = begin()

    def loss(model: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x), y)

    def small() -> Any:
        generator = torch.Generator().manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(),
                                    torch.nn.Linear(8 * 36, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model.to(gpu)

    OPTIONS: dict[str, Any] = {"fp16": {"compression": hvd.Compression.fp16}, "bf16": {"compression": hvd.Compression.bf16},
               "groups": {"groups": 2}, "accumulated": {"backward_passes_per_step": 2}}

    def train(variant: str, distributed: bool) -> tuple[Any, Any]:
        model = small()
        if variant == "channels last":
            model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if distributed:
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **OPTIONS.get(variant, {}))
        run = torch.compile(model, backend="aot_eager") if variant == "compiled" and distributed else model
        passes = 2 if variant == "accumulated" else 1
        for x, y in batches(8, size):
            optimizer.zero_grad(set_to_none=variant != "kept")
            shares = list(zip(x.chunk(size), y.chunk(size), strict=True))
            for xs, ys in [shares[rank]] if distributed else shares:
                for xp, yp in zip(xs.chunk(passes), ys.chunk(passes), strict=True):
                    (loss(run, xp, yp) / (1 if distributed else size)).backward()
            if variant == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return model, optimizer

    failed = []
    for variant in variants:
        ours, optimizer = train(variant, True)
        alone, _ = train(variant, False)
        try:
            assert has_learned(optimizer), "buckets were never learned"
            rtol, atol = (5e-2, 1e-2) if variant in ("fp16", "bf16") else (1e-4, 1e-5)
            for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
            assert all(parameter.grad.device == parameter.device for parameter in ours.parameters())
            if views and variant not in OPTIONS:
                assert all(parameter.grad.data_ptr() % 256 == 0 for parameter in ours.parameters())
            if variant != "compiled":
                assert all(parameter.grad.stride() == parameter.stride() for parameter in ours.parameters())
        except AssertionError:
            failed.append(f"--- {variant} ---\n{traceback.format_exc()}")
        same_everywhere(ours)
    assert not failed, "\n".join(failed)
    hvd.shutdown()


def unused_parameters_and_loss_scaling() -> None:
    rank, _, gpu = begin()
    model = torch.nn.ModuleDict({name: torch.nn.Linear(16, 4) for name in "abc"}).to(gpu)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                                         model.named_parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    for turn in range(8):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            value = model["a"](torch.ones(4, 16, device=gpu)) + (model["b"](torch.ones(4, 16, device=gpu)) if rank else 0)
            value = value.square().mean()
        if turn == 5 and rank == 1:
            value = value * float("inf")
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert all(parameter.grad is None for parameter in model["c"].parameters())
    assert scaler.get_scale() == 64.0, "one rank's inf is everybody's"
    same_everywhere(model)
    hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.shutdown()


def beside_torchs_own_nccl() -> None:
    rank, size, gpu = begin()
    dist.init_process_group("nccl", init_method=f"file://{os.environ['HVDLITE_JOB_DIRECTORY']}/store", rank=rank,
                            world_size=size, device_id=gpu)
    model = net()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    for x, y in batches(6, 1):
        step(model, optimizer, x, y)
        # Both libraries' kernels in one order on all ranks: theirs come behind ours on this stream.
        metric = torch.full((4,), rank + 1.0, device=gpu)
        dist.all_reduce(metric)
        assert (metric == 3).all()
    same_everywhere(model)
    torch.cuda.synchronize()
    hvd.shutdown()
    dist.destroy_process_group()
    try:
        os.unlink(f"{os.environ['HVDLITE_JOB_DIRECTORY']}/store")
    except FileNotFoundError:
        pass


def sparse_gradients_norms_and_parameters_on_both_sides() -> None:
    rank, _, gpu = begin()
    embedding = torch.nn.Embedding(20, 4, sparse=True).to(gpu)
    dense, on_host = torch.nn.Linear(4, 3).to(gpu), torch.nn.Linear(4, 3)
    norm = hvd.SyncBatchNorm(3).to(gpu)
    modules = torch.nn.ModuleList([embedding, dense, on_host, norm])
    hvd.broadcast_parameters(modules.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(modules.parameters(), lr=0.1), modules.named_parameters())
    for turn in range(6):
        optimizer.zero_grad()
        vectors = embedding(torch.tensor([rank, turn, 7], device=gpu))
        value = norm(dense(vectors)).square().mean() + on_host(vectors.cpu()).square().mean().to(gpu)
        value.backward()
        assert embedding.weight.grad.layout is torch.sparse_coo and embedding.weight.grad.device == gpu
        optimizer.step()
    same_everywhere(modules)
    hvd.shutdown()


def nothing_waits_for_the_gpu_in_a_step() -> None:
    begin()
    model = net(wide=512)
    with sharing_alone():
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    data = list(batches(12, 1))
    for x, y in data[:8]:
        step(model, optimizer, x, y)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with torch.profiler.record_function(STEPS):
            for x, y in data[8:]:
                step(model, optimizer, x, y)
        torch.cuda.set_sync_debug_mode("default")
    names = names_within(trace.events())
    assert any(name.startswith("cu") for name in names), "the profiler saw no calls of CUDA's"
    assert not [name for name in names if is_wait(name)]
    assert has_learned(optimizer)
    hvd.shutdown()
