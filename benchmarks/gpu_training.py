"""Training on one GPU for `gpu_check`: what wrapping costs, against plain training and DDP; and what waits in a step."""

from __future__ import annotations

import contextlib
import inspect
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu_sheet import Setup, Sheet, has_learned, replaced_all_reduce, sharing_alone

STEPS = "training steps"
"""A mark in the profile."""
BATCHED = "DDP with batched copies"
WARM_UP = 5
"""Steps before anything is measured; buckets are learned in them."""


def kinds() -> tuple[str, ...]:
    """Return the ways to train one model: "wrapped" alone does not exchange gradients, "sharing" does so with itself."""
    import torch
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    return ("plain", "wrapped", "sharing", "DDP", *([BATCHED] if "batched_grad_copy" in known else []))


def images(setup: Setup, gpu: Any, batch: int, pixels: int, channels: int = 3, classes: int = 1000) -> tuple[Any, Any]:
    """Return a batch and its labels."""
    import torch
    x = torch.randn(batch, channels, pixels, pixels, device=gpu).to(memory_format=torch.channels_last)
    return x, torch.randint(0, classes, (batch,), device=gpu)


def stepper(setup: Setup, kind: str, make: Callable[[], Any], data: tuple[Any, Any], half: Any = None,
            hook: Any = None) -> Callable[[], None]:
    """Return a training step of a new model.

    Args:
        half: the dtype of autocast; None: without.
        hook: DDP's communication hook.
    """
    import torch

    import hvdlite_torch as hvd
    x, y = data
    torch.manual_seed(1)
    model: Any = make().to(x.device).to(memory_format=torch.channels_last)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if kind in ("wrapped", "sharing"):
        with sharing_alone() if kind == "sharing" else contextlib.nullcontext():
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    elif kind != "plain":
        model = setup.ddp(model, **({"batched_grad_copy": True} if kind == BATCHED else {}))
        if hook is not None:
            model.register_comm_hook(None, hook)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, half or torch.bfloat16, enabled=half is not None):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    assert kind != "sharing" or has_learned(optimizer), "buckets were never learned"
    return step


def take_turns(contenders: Mapping[str, Callable[[], None]], steps: int,
               rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, list[float]]]:
    """Return for each contender and round the seconds of a step until the GPU is through, until the host is, and the CPU
    seconds of all threads of this process."""
    import torch
    names = list(contenders)
    whole, host, cpu = (dict[str, list[float]]((name, []) for name in names) for _ in range(3))
    for turn in range(rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            torch.cuda.synchronize()
            began, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                contenders[name]()
            host[name].append((time.perf_counter() - began) / steps)
            torch.cuda.synchronize()
            whole[name].append((time.perf_counter() - began) / steps)
            cpu[name].append((time.process_time() - used) / steps)
    return whole, host, cpu


def contest(sheet: Sheet, name: str, made: Mapping[str, Callable[[], Callable[[], None]]], steps: int, rounds: int) -> None:
    """Let contenders take turns, and write down their figures and ratios."""
    contenders: dict[str, Callable[[], None]] = {}
    for kind, make in made.items():
        with sheet.part(f"{name}: {kind}"):
            contenders[kind] = make()
    whole, host, cpu = take_turns(contenders, steps, rounds)
    medians = [{kind: statistics.median(values) for kind, values in each.items()} for each in (whole, host, cpu)]
    for kind in contenders:
        sheet.add(f"{name}: {kind}", medians[0][kind] * 1e3, "ms")
        sheet.add(f"{name}: {kind}, until the host is through", medians[1][kind] * 1e3, "ms")
        sheet.add(f"{name}: {kind}, CPU time of all threads", medians[2][kind] * 1e3, "ms")
    sheet.note(f"{name}: all rounds, ms", {kind: [1e3 * value for value in each] for kind, each in whole.items()})
    ours = "sharing" if "sharing" in contenders else "wrapped"
    for one, other in (("wrapped", "plain"), ("sharing", "plain"), ("DDP", "plain"), (BATCHED, "plain")):
        if one in contenders and other in contenders:
            sheet.add(f"{name}: {one} / {other}", medians[0][one] / medians[0][other])
    rivals = [kind for kind in ("DDP", BATCHED) if kind in contenders]
    if ours in contenders and rivals:
        for each, what in zip(medians, ("", ", host", ", CPU time"), strict=True):
            sheet.add(f"{name}{what}: {ours} / the faster DDP", each[ours] / min(each[kind] for kind in rivals))


def training(sheet: Sheet, setup: Setup) -> None:
    """Compare steps that the GPU limits."""
    import torch
    gpu, work = setup.gpu(), setup.work
    import hvdlite_torch as hvd
    hvd.init()
    torch.backends.cudnn.benchmark = True
    setup.join_torch(gpu)
    for name, half, steps in (("resnet50 float32", None, 8), ("resnet50 bfloat16", torch.bfloat16, 10)):
        with sheet.part(name):
            data = images(setup, gpu, work.batch, work.pixels)
            contest(sheet, name, makers(setup, kinds(), work.model, data, half), work.times(steps), work.times(5))
    with sheet.part("fashion mnist"):
        from benchmarks.training import Cnn
        data = images(setup, gpu, work.times(128, 4), 28, 1, 10)
        contest(sheet, "Fashion-MNIST CNN", makers(setup, kinds(), Cnn, data), work.times(100), work.times(7))
    setup.leave_torch()
    hvd.shutdown()


def makers(setup: Setup, of: Sequence[str], make: Callable[[], Any], data: tuple[Any, Any],
           half: Any = None) -> dict[str, Callable[[], Callable[[], None]]]:
    """Return what makes each kind's step."""
    return {kind: lambda kind=kind: stepper(setup, kind, make, data, half) for kind in of}  # type: ignore[misc]


def small_steps(sheet: Sheet, setup: Setup) -> None:
    """Compare steps that the host limits: few and small images."""
    gpu, work = setup.gpu(), setup.work
    import hvdlite_torch as hvd
    hvd.init()
    setup.join_torch(gpu)
    data = images(setup, gpu, work.small_batch, work.small_pixels)
    contest(sheet, "small resnet50", makers(setup, kinds(), work.model, data), work.times(20), work.times(9))
    setup.leave_torch()
    hvd.shutdown()


# --- overlap -----------------------------------------------------------------------------------------------------


def sleeps_per_second() -> float:
    """Return how many cycles of `torch.cuda._sleep` take a second."""
    import torch
    cycles = 20_000_000
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first one loads the kernel
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)


def overlap(sheet: Sheet, setup: Setup) -> None:
    """Put a kernel that only takes time in the place of NCCL's, and see how much of it the backward pass hides."""
    import torch
    gpu, work = setup.gpu(), setup.work
    import hvdlite_torch as hvd
    hvd.init()
    setup.join_torch(gpu)
    cycles = sleeps_per_second()
    data = images(setup, gpu, work.batch, work.pixels)
    nbytes = sum(parameter.nbytes for parameter in work.model().parameters())
    delay = [0]  # cycles per MiB
    side = torch.cuda.Stream()

    def ours(real: Any, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        real(source, target, count, dtype, op, stream)
        if delay[0]:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=gpu)):
                torch.cuda._sleep(count * 4 * delay[0] >> 20)

    def theirs(state: Any, bucket: Any) -> Any:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if delay[0]:
                torch.cuda._sleep(bucket.buffer().nbytes * delay[0] >> 20)
            future: Any = torch.futures.Future(devices=[gpu])
            future.set_result(bucket.buffer())
        return future

    theirs.__annotations__.clear()  # torch takes others than its own for a mistake
    contenders = {"sharing": stepper(setup, "sharing", work.model, data),
                  "DDP": stepper(setup, "DDP", work.model, data, hook=theirs)}
    with replaced_all_reduce(ours):
        seconds: dict[tuple[str, float], float] = {}
        for share in (0.0, 0.25, 0.5):
            total = share * min((seconds[name, 0.0] for name in contenders if share), default=0.0)
            delay[0] = int(total * cycles / (nbytes / (1 << 20)))
            whole, _, _ = take_turns(contenders, work.times(5), work.times(4))
            for name, each in whole.items():
                seconds[name, share] = statistics.median(each)
                sheet.add(f"{name}: a step with {share:.0%} of its time as communication", seconds[name, share] * 1e3, "ms")
                if share:
                    sheet.add(f"{name}: hidden of {share:.0%}", 1 - (seconds[name, share] - seconds[name, 0.0]) / total)
    setup.leave_torch()
    hvd.shutdown()


# --- what waits ----------------------------------------------------------------------------------------------------


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


def waits(sheet: Sheet, setup: Setup) -> None:
    """Look with the profiler for calls that wait for the GPU within training steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    gpu, work = setup.gpu(), setup.work
    import hvdlite_torch as hvd
    hvd.init()
    step = stepper(setup, "sharing", work.model, images(setup, gpu, work.batch, work.pixels))
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
    seen = sum(count for name, count in names.items() if name.startswith("cu"))
    sheet.add("CUDA calls that the profiler saw, per step", seen / 5)
    if seen:
        sheet.add("calls that wait, per step", sum(waiting.values()) / 5)
    sheet.note("calls that wait", waiting)
    sheet.note("CUDA calls", {name: count for name, count in names.items() if name.startswith("cu")})
    sheet.note("our kernels and NCCL's", sorted({event.name for event in trace.events()
                                                 if "nccl" in event.name.lower() or "hvdlite" in event.name.lower()}))
    with sheet.part("table"):
        for order, key in (("by host time", "self_cpu_time_total"), ("by GPU time", "self_cuda_time_total")):
            sheet.note(order, trace.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))
    hvd.shutdown()
