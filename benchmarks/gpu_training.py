"""Training on one GPU for `gpu_check`: what wrapping costs, against plain training and DDP; and what waits in a step."""

from __future__ import annotations

import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_sheet import Sheet, one_gpu_each, share_even_alone

BATCH = 64
STEPS = "training steps"
"""A mark in the profile."""


def resnet50() -> Any:
    try:
        import torchvision
        return torchvision.models.resnet50()
    except Exception:
        from benchmarks.resnet import ResNet50
        return ResNet50()


def training(sheet: Sheet) -> None:
    import torch
    import torch.distributed as dist
    gpu = one_gpu_each()
    import hvdlite_torch as hvd
    hvd.init()
    torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1, device_id=gpu)
    with sheet.part("resnet50 float32"):
        _contest(sheet, "resnet50 float32", resnet50, (BATCH, 3, 224, 224), 1000, gpu, None, steps=8, rounds=5)
    with sheet.part("resnet50 bfloat16"):
        _contest(sheet, "resnet50 bfloat16", resnet50, (BATCH, 3, 224, 224), 1000, gpu, torch.bfloat16, steps=10, rounds=5)
    with sheet.part("fashion mnist"):
        from benchmarks.training import Cnn
        _contest(sheet, "Fashion-MNIST CNN", Cnn, (128, 1, 28, 28), 10, gpu, None, steps=100, rounds=7)
    dist.destroy_process_group()
    hvd.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _contest(sheet: Sheet, name: str, make: Callable[[], Any], shape: tuple[int, ...], classes: int, gpu: Any, half: Any, *,
             steps: int, rounds: int) -> None:
    """Let plain training, ours (alone, and sharing with itself) and DDP take turns."""
    import torch

    import hvdlite_torch as hvd
    from hvdlite.training.gradient_reducer import GradientReducer
    x = torch.randn(shape, device=gpu).to(memory_format=torch.channels_last) if len(shape) == 4 else torch.randn(shape)
    y = torch.randint(0, classes, shape[:1], device=gpu)

    def contender(kind: str) -> Callable[[], None]:
        torch.manual_seed(1)
        model: Any = make().to(gpu).to(memory_format=torch.channels_last)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if kind in ("wrapped", "sharing"):
            real = GradientReducer.__init__
            if kind == "sharing":
                share_even_alone()
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            GradientReducer.__init__ = real  # type: ignore[method-assign]
        elif kind == "DDP":
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[gpu.index], gradient_as_bucket_view=True)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", half or torch.float16, enabled=half is not None):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return step

    contenders: dict[str, Callable[[], None]] = {}
    for kind in ("plain", "wrapped", "sharing", "DDP"):
        with sheet.part(f"{name}: {kind}"):
            made = contender(kind)
            for _ in range(5):
                made()
            torch.cuda.synchronize()
            contenders[kind] = made
    times: dict[str, list[float]] = defaultdict(list)
    hosts: dict[str, list[float]] = defaultdict(list)
    names = list(contenders)
    for turn in range(rounds):
        for kind in names[turn % len(names):] + names[:turn % len(names)]:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                contenders[kind]()
            hosts[kind].append((time.perf_counter() - began) / steps)
            torch.cuda.synchronize()
            times[kind].append((time.perf_counter() - began) / steps)
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    for kind in names:
        sheet.add(f"{name}: {kind}", medians[kind] * 1e3, "ms")
        sheet.add(f"{name}: {kind}, until the host is through", statistics.median(hosts[kind]) * 1e3, "ms")
    sheet.note(f"{name}: all rounds, ms", {kind: [1e3 * value for value in each] for kind, each in times.items()})
    for one, other in (("wrapped", "plain"), ("sharing", "plain"), ("DDP", "plain"), ("sharing", "DDP")):
        if one in medians and other in medians:
            sheet.add(f"{name}: {one} / {other}", medians[one] / medians[other], "")


def names_within(events: Any) -> list[str]:
    """Return the names of what the profiler saw on the host's threads within the steps; it synchronises itself later."""
    from torch.autograd import DeviceType
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    (steps,) = (event.time_range for event in on_host if event.name == STEPS)
    return [event.name for event in on_host if steps.start <= event.time_range.start <= steps.end]


def is_wait(name: str) -> bool:
    """Say whether the host waits for the GPU in a call of CUDA's, or may."""
    return (name.startswith("cu") and "ynchronize" in name) or name in ("cudaMemcpy", "cudaFree", "cudaMalloc",
                                                                        "cudaHostAlloc", "cudaMemGetInfo")


def waits(sheet: Sheet) -> None:
    """Look with the profiler for calls that wait for the GPU within training steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    gpu = one_gpu_each()
    import hvdlite_torch as hvd
    hvd.init()
    share_even_alone()
    model = resnet50().to(gpu).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    x = torch.randn(BATCH, 3, 224, 224, device=gpu).to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (BATCH,), device=gpu)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        torch.cuda.set_sync_debug_mode("warn")
        with torch.profiler.record_function(STEPS):
            for _ in range(5):
                step()
        torch.cuda.set_sync_debug_mode("default")
    names: dict[str, int] = defaultdict(int)
    for name in names_within(trace.events()):
        names[name] += 1
    waiting = {name: count for name, count in names.items() if is_wait(name)}
    sheet.add("calls that wait, per step", sum(waiting.values()) / 5)
    sheet.note("calls that wait", waiting)
    sheet.note("CUDA calls", {name: count for name, count in names.items() if name.startswith("cu")})
    kernels = sorted(((name, count) for name, count in names.items() if "nccl" in name.lower() or "hvdlite" in name.lower()))
    sheet.note("our kernels and NCCL's", kernels)
    with sheet.part("table"):
        sheet.note("by host time", trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=25,
                                                               max_name_column_width=60))
        sheet.note("by GPU time", trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=25,
                                                              max_name_column_width=60))
    hvd.shutdown()
