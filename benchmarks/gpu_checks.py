"""What `gpu_check` measures; each check is a function in a process of its own: `python -m benchmarks.gpu_checks NAME FILE`.

Parts of a check are isolated: one that fails is recorded with its traceback, and the next one begins.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_latency import launch, several_ranks
from benchmarks.gpu_sheet import Setup, Sheet, has_learned, sharing_alone
from benchmarks.gpu_situations import kernels, situations
from benchmarks.gpu_training import overlap, small_steps, training, waits
from benchmarks.gpu_two_ranks import two_ranks


def environment(sheet: Sheet, setup: Setup) -> None:
    """Say what there is, and try each layer once."""
    import torch
    gpu = setup.gpu()
    with sheet.part("torch"):
        properties = torch.cuda.get_device_properties(gpu)
        sheet.add("GPU", properties.name)
        sheet.add("multiprocessors", properties.multi_processor_count)
        sheet.add("compute capability", f"{properties.major}.{properties.minor}")
        sheet.add("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")
    with sheet.part("library"):
        from hvdlite.planes.nccl import library
        sheet.add("suggested extra", library.suggested_extra())
        cupy = library.load(dict(os.environ))
        sheet.add("CuPy", cupy.__version__)
        sheet.add("NCCL through CuPy", library.version_text(cupy.cuda.nccl.get_version()))
        sheet.add("copies of NCCL", len(library.copies()))
        sheet.note("NCCL's files", sorted(library.copies()))
    with sheet.part("device"):
        device = setup.device(gpu.index)
        sheet.add("identity", device.bus_id())
        sheet.add("stream priority", cupy.cuda.runtime.streamGetPriority(device.stream))
    with sheet.part("kernels"):
        for source, target, factor in (("float32", "float32", 1.0), ("float32", "bfloat16", 1.0),
                                       ("float16", "float32", 0.5)):
            began = time.perf_counter()
            assert device.batched_copy([], source, target, device.stream, factor), "there are no kernels"
            sheet.add(f"compiling {source} to {target}", 1e3 * (time.perf_counter() - began), "ms")
    with sheet.part("communicator"):
        began = time.perf_counter()
        communicator = device.communicator(1, device.unique_id(), 0)
        sheet.add("making a communicator of one rank", 1e3 * (time.perf_counter() - began), "ms")
        began = time.perf_counter()
        communicator.abort()
        sheet.add("aborting it", 1e3 * (time.perf_counter() - began), "ms")
    with sheet.part("job"):
        import hvdlite_torch as hvd
        hvd.init()
        assert (hvd.allreduce(torch.full((5,), 3.0, device=gpu), op=hvd.Sum) == 3).all()
        hvd.shutdown()
        sheet.add("a job of one rank", "works")


# --- pack ----------------------------------------------------------------------------------------------------


def pack(sheet: Sheet, setup: Setup) -> None:
    """Measure the kernel that packs and unpacks, on ResNet-50's gradients."""
    import torch
    gpu, work = setup.gpu(), setup.work
    device = setup.device(gpu.index)
    stream = torch.cuda.Stream()
    sources = [torch.randn(shape, device=gpu) for shape in work.shapes()]
    nbytes = sum(tensor.nbytes for tensor in sources)
    room = torch.empty(nbytes + 256 * len(sources), dtype=torch.uint8, device=gpu)

    def places(dtype: Any) -> list[Any]:
        out, at = [], 0
        for tensor in sources:
            length = tensor.numel() * dtype.itemsize
            out.append(room[at:at + length].view(dtype).view(tensor.shape))
            at = -(-(at + length) // 256) * 256
        return out

    def copies(froms: Sequence[Any], tos: Sequence[Any]) -> list[tuple[int, int, int]]:
        return [(one.data_ptr(), other.data_ptr(), one.numel()) for one, other in zip(froms, tos, strict=True)]

    def seconds(call: Callable[[], object]) -> tuple[float, float]:
        """Return the GPU's and the host's seconds per call, medians."""
        on_gpu, on_host = [], []
        with torch.cuda.stream(stream):
            for turn in range(work.times(30) + 5):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(4_000_000)  # some 2 ms, so that launching is not in the figure
                begin.record(stream)
                began = time.perf_counter()
                call()
                host = time.perf_counter() - began
                end.record(stream)
                end.synchronize()
                if turn >= 5:
                    on_gpu.append(begin.elapsed_time(end) / 1e3)
                    on_host.append(host)
        return statistics.median(on_gpu), statistics.median(on_host)

    flat, other = torch.randn(nbytes // 4, device=gpu), torch.empty(nbytes // 4, device=gpu)
    copy, _ = seconds(lambda: other.copy_(flat))
    sheet.add("bytes packed", nbytes / 1e6, "MB")
    sheet.add("copy of one tensor of as many bytes", 2 * nbytes / copy / 1e9, "GB/s")
    both = 0.0
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        moved = nbytes + nbytes * dtype.itemsize // 4
        with sheet.part(name):
            there, back = copies(sources, places(dtype)), copies(places(dtype), sources)
            for what, call in (
                    ("pack", lambda there=there, name=name: device.batched_copy(there, "float32", name, stream.cuda_stream)),
                    ("unpack", lambda back=back, name=name: device.batched_copy(back, name, "float32", stream.cuda_stream)),
                    ("unpack and scale", lambda back=back, name=name: device.batched_copy(
                        back, name, "float32", stream.cuda_stream, 0.5))):
                gpu_seconds, host_seconds = seconds(call)
                sheet.add(f"{what}, {name} in the bucket", moved / gpu_seconds / 1e9, "GB/s")
                sheet.add(f"{what}, {name} in the bucket, host", host_seconds * 1e6, "us")
                if dtype is torch.float32 and what != "unpack and scale":
                    both += gpu_seconds
            into = places(dtype)
            gpu_seconds, host_seconds = seconds(lambda into=into: torch._foreach_copy_(into, sources))
            sheet.add(f"torch._foreach_copy_, {name}", moved / gpu_seconds / 1e9, "GB/s")
            sheet.add(f"torch._foreach_copy_, {name}, host", host_seconds * 1e6, "us")
            gpu_seconds, _ = seconds(lambda into=into: [to.copy_(of) for to, of in zip(into, sources, strict=True)])
            sheet.add(f"one copy a tensor, {name}", moved / gpu_seconds / 1e9, "GB/s")
    with sheet.part("sizes"):
        for length in map(work.elements, (1 << 10, 1 << 16, 1 << 20, 1 << 24)):
            one, two = torch.randn(length, device=gpu), torch.empty(length, device=gpu)
            pair = copies([one], [two])
            kernel, _ = seconds(lambda pair=pair: device.batched_copy(pair, "float32", "float32", stream.cuda_stream))
            plain, _ = seconds(lambda one=one, two=two: two.copy_(one))
            sheet.add(f"one tensor of {length * 4 >> 10} KiB: kernel / copy", plain / kernel, "times as fast")
    if both:
        sheet.add("pack and unpack / copy", 2 * copy / both, "of its bandwidth")


# --- host time -----------------------------------------------------------------------------------------------


def median_of(work: Callable[[], object], repeats: int) -> float:
    """Return the host microseconds of a call."""
    import torch
    times = []
    warm_up = min(20, repeats)
    for turn in range(repeats + warm_up):
        began = time.perf_counter()
        work()
        if turn >= warm_up:
            times.append(time.perf_counter() - began)
        if turn % 50 == 0:
            torch.cuda.synchronize()  # a full queue would be in the figure
    return statistics.median(times) * 1e6


def host(sheet: Sheet, setup: Setup) -> None:
    """Measure calls, launches and gradients on the host."""
    import torch
    gpu = setup.gpu()
    import hvdlite_torch as hvd
    from hvdlite import api
    from hvdlite_torch.arrays import cuda
    hvd.init()
    tensor = torch.ones(1024, device=gpu)
    hvd.allreduce_(tensor, op=hvd.Sum)
    plane: Any = api.runtime().devices
    index, repeats = cuda.cuda_index(tensor), setup.work.times(300)

    def add(name: str, work: Callable[[], object]) -> None:
        sheet.add(name, median_of(work, repeats), "us")
    with sheet.part("calls"):
        add("current stream", lambda: cuda.current_stream(index))
        add("ready event", lambda: plane.record_event(0))
        add("lending a tensor", lambda: cuda.wrap(tensor, plane))
        add("allreduce_ of 4 KiB, from the call until it is launched and followed",
            lambda: hvd.allreduce_(tensor, op=hvd.Sum))
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
            times.append(time.perf_counter() - began)
            hvd.synchronize(handle)
        sheet.add("allreduce_async_ of 4 KiB, the call alone", statistics.median(times) * 1e6, "us")
        empty = torch.empty(0)
        add("the same negotiation without a GPU (host, no bytes)", lambda: hvd.allreduce_(empty, op=hvd.Sum))
    with sheet.part("NCCL"):
        communicator = plane._communicators.refs[0].communicator
        pointer, stream, events = tensor.data_ptr(), plane._device.stream, plane._events
        add("allReduce through CuPy, the call alone", lambda: communicator.allReduce(pointer, pointer, 1024, 7, 0, stream))
        add("recording an event", lambda: events.record(stream))
        event = events.record(stream)
        add("waiting for an event on a stream", lambda: plane._device.wait(stream, event.handle))
        add("asking an event", lambda: plane._device.is_event_done(event.handle))
    with sheet.part("gradients"):
        _gradients(sheet, setup, gpu)
    hvd.shutdown()


@contextlib.contextmanager
def _timed(spent: dict[str, list[float]], methods: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """Write down the seconds of each call of some methods."""
    def timed(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*arguments, **options)
            finally:
                spent[name].append(time.perf_counter() - began)
        return call
    before = []
    for given, name in methods:
        owner = next(each for each in given.__mro__ if name in each.__dict__)  # where it is defined
        before.append((owner, name, owner.__dict__[name]))
    for owner, name, real in before:
        setattr(owner, name, timed(name, real))
    try:
        yield
    finally:
        for owner, name, real in before:
            setattr(owner, name, real)


def _gradients(sheet: Sheet, setup: Setup, gpu: Any) -> None:
    """Measure what hooks, buckets and the wait at the end cost the host, on ResNet-50's gradients without its work."""
    import torch

    import hvdlite_torch as hvd
    from hvdlite.training.gradients.reducer import Reducer
    from hvdlite_torch.gradients.gpu_places import GpuPlaces
    from hvdlite_torch.gradients.hooks import Hooks
    parameters = [torch.nn.Parameter(torch.randn(shape, device=gpu) * 0.01) for shape in setup.work.shapes()]
    with sharing_alone():
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.01), [
            (str(index), parameter) for index, parameter in enumerate(parameters)])
    turns, spent = setup.work.times(20), defaultdict[str, list[float]](list)

    def backward() -> float:
        optimizer.zero_grad()
        loss = sum((parameter.sum() for parameter in parameters), torch.zeros((), device=gpu))
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss.backward()
        return time.perf_counter() - began

    for _ in range(4):
        backward()
    assert has_learned(optimizer), "buckets were never learned"
    buckets = len(optimizer._hooks.reducer.layout.plans)
    wrapped = [backward() for _ in range(turns)]
    with _timed(spent, [(Hooks, "_accumulated"), (GpuPlaces, "fill"), (GpuPlaces, "results"), (GpuPlaces, "filled"),
                        (Reducer, "wait")]):
        for _ in range(turns):
            backward()
    for parameter in parameters:
        parameter._post_accumulate_grad_hooks.clear()
    plain = [backward() for _ in range(turns)]
    sheet.add("gradients", len(parameters))
    sheet.add("buckets", buckets)
    sheet.add("backward without hooks", statistics.median(plain) * 1e3, "ms")
    sheet.add("backward with hooks, and the wait", statistics.median(wrapped) * 1e3, "ms")
    more = statistics.median(wrapped) - statistics.median(plain)
    sheet.add("more, per gradient", more / len(parameters) * 1e6, "us")
    for name, times in spent.items():
        sheet.add(f"host: {name}, each", statistics.median(times) * 1e6, "us")
        sheet.add(f"host: {name}, a step", sum(times) / turns * 1e6, "us")


# --- against torch.distributed -------------------------------------------------------------------------------


def nccl(sheet: Sheet, setup: Setup) -> None:
    """Reduce the same buffers through CuPy's NCCL and through torch's; ranks have a GPU each, or share one."""
    import torch
    gpu = setup.gpu()
    import torch.distributed as dist

    import hvdlite_torch as hvd
    hvd.init()
    shared = torch.cuda.device_count() < setup.size
    sheet.note("path", setup.path())
    setup.join_torch(gpu)
    repeats = 3 if shared else 20
    for length in map(setup.work.elements, (1 << 10, 1 << 18, 25 << 18, *(() if shared else (1 << 26,)))):
        one, two = torch.ones(length, device=gpu), torch.ones(length, device=gpu)
        figures: dict[str, list[float]] = defaultdict(list)
        ways: Mapping[str, Callable[[], object]] = {
            "hvdlite": lambda one=one: hvd.allreduce_(one, op=hvd.Average),  # type: ignore[misc]
            "torch.distributed": lambda two=two: dist.all_reduce(two, op=dist.ReduceOp.AVG)}  # type: ignore[misc]
        with sheet.part(f"{length * 4} bytes"):
            for turn in range(setup.work.times(5 if shared else 7, 2)):
                for name, work in ways.items():
                    torch.cuda.synchronize()
                    hvd.barrier()
                    began = time.perf_counter()
                    for _ in range(repeats):
                        work()
                    torch.cuda.synchronize()
                    if turn:
                        figures[name].append((time.perf_counter() - began) / repeats)
            for name, times in figures.items():
                seconds, moved = statistics.median(times), 2 * (setup.size - 1) / setup.size * 4 * length
                sheet.add(f"allreduce of {length * 4} bytes: {name}", seconds * 1e3, "ms")
                sheet.add(f"allreduce of {length * 4} bytes: {name}, bus bandwidth", moved / seconds / 1e9, "GB/s")
            assert (one == 1).all() and (two == 1).all()
    torch.cuda.synchronize()
    hvd.shutdown()
    setup.leave_torch()


CHECKS: dict[str, Callable[[Sheet, Setup], None]] = {
    "environment": environment, "pack": pack, "host": host, "training": training, "small steps": small_steps, "waits": waits,
    "overlap": overlap, "launch": launch, "situations": situations, "kernels": kernels, "nccl": nccl,
    "several ranks": several_ranks, "two ranks": two_ranks}


def run(name: str, path: Path, setup: Setup) -> int:
    """Run a check; return its exit code."""
    sheet = Sheet(path)
    sheet.write()
    try:
        CHECKS[name](sheet, setup)
    except BaseException:
        sheet.record["errors"]["all"] = traceback.format_exc()
        print(sheet.record["errors"]["all"], flush=True)
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    sheet.note("threads left", left)
    return 1 if sheet.record["errors"] else 0


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # `gpu_check` asks before it ends what takes too long
    setup = Setup(int(os.environ.get("HVDLITE_RANK", 0)), int(os.environ.get("HVDLITE_SIZE", 1)))
    code = run(sys.argv[1], Path(sys.argv[2]), setup)
    sys.stdout.flush()
    os._exit(code)  # what hangs at the end must not cost the figures; the tests look at that


if __name__ == "__main__":
    main()
