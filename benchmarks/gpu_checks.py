"""What `gpu_check` measures; each check is a function in a process of its own: `python -m benchmarks.gpu_checks NAME FILE`.

Parts of a check are isolated: one that fails is recorded with its traceback, and the next one begins.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_sheet import RANK, SIZE, Sheet, one_gpu_each, share_even_alone
from benchmarks.gpu_training import training, waits


def environment(sheet: Sheet) -> None:
    import torch
    gpu = one_gpu_each()
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
        from hvdlite.planes.nccl.device import CupyDevice
        from hvdlite.planes.nccl.kernels import source_code
        device = CupyDevice(gpu.index, 0, {})
        device.make_current()
        sheet.add("identity", device.bus_id())
        sheet.add("stream priority", cupy.cuda.runtime.streamGetPriority(device.stream))
    with sheet.part("kernels"):
        for source, target, scaling in (("float32", "float32", False), ("float32", "bfloat16", False),
                                        ("float16", "float32", True)):
            began = time.perf_counter()
            kernel = device._kernel((source, target, scaling), functools.partial(source_code, source, target, scaling))
            sheet.add(f"compiling {source} to {target}", 1e3 * (time.perf_counter() - began), "ms")
            sheet.note(f"kernel {source} {target} {scaling}", str(getattr(kernel, "attributes", kernel)))
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


def resnet_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's 161 parameters; 25.6 million elements."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outside = width * 4
            shapes += [(width, inside, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,),
                       (outside, width, 1, 1), (outside,), (outside,)]
            if block == 0:
                shapes += [(outside, inside, 1, 1), (outside,), (outside,)]
            inside = outside
    return [*shapes, (1000, 2048), (1000,)]


def pack(sheet: Sheet) -> None:
    import torch
    gpu = one_gpu_each()
    from hvdlite.planes.nccl.device import CupyDevice
    from hvdlite.planes.nccl.kernels import Scaling
    device = CupyDevice(gpu.index, 0, {})
    device.make_current()
    stream = torch.cuda.Stream()
    sources = [torch.randn(shape, device=gpu) for shape in resnet_shapes()]
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

    def seconds(work: Callable[[], object], repeats: int = 30) -> tuple[float, float]:
        """Return the GPU's and the host's seconds per call, medians."""
        on_gpu, on_host = [], []
        with torch.cuda.stream(stream):
            for turn in range(repeats + 5):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(4_000_000)  # some 2 ms, so that launching is not in the figure
                begin.record(stream)
                began = time.perf_counter()
                work()
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
            for what, work in (
                    ("pack", lambda there=there, name=name: device.batched_copy(there, "float32", name, stream.cuda_stream)),
                    ("unpack", lambda back=back, name=name: device.batched_copy(back, name, "float32", stream.cuda_stream)),
                    ("unpack and scale", lambda back=back, name=name: device.batched_copy(
                        back, name, "float32", stream.cuda_stream, Scaling(0.5)))):
                gpu_seconds, host_seconds = seconds(work)
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
        for length in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
            one, two = torch.randn(length, device=gpu), torch.empty(length, device=gpu)
            pair = copies([one], [two])
            kernel, _ = seconds(lambda pair=pair: device.batched_copy(pair, "float32", "float32", stream.cuda_stream))
            plain, _ = seconds(lambda one=one, two=two: two.copy_(one))
            sheet.add(f"one tensor of {length * 4 >> 10} KiB: kernel / copy", plain / kernel, "times as fast")
    if both:
        sheet.add("pack and unpack / copy", 2 * copy / both, "of its bandwidth")


# --- host time -----------------------------------------------------------------------------------------------


def median_of(work: Callable[[], object], repeats: int = 300) -> float:
    """Return the host microseconds of a call."""
    import torch
    times = []
    for turn in range(repeats + 20):
        began = time.perf_counter()
        work()
        if turn >= 20:
            times.append(time.perf_counter() - began)
        if turn % 50 == 0:
            torch.cuda.synchronize()  # a full queue would be in the figure
    return statistics.median(times) * 1e6


def host(sheet: Sheet) -> None:
    import torch
    gpu = one_gpu_each()
    import hvdlite_torch as hvd
    from hvdlite import api
    from hvdlite_torch import cuda
    hvd.init()
    tensor = torch.ones(1024, device=gpu)
    hvd.allreduce_(tensor, op=hvd.Sum)
    devices, runtime = api.runtime().devices, api.runtime()
    with sheet.part("calls"):
        sheet.add("current stream", median_of(lambda: cuda.current_stream(gpu.index)), "us")
        sheet.add("ready event", median_of(lambda: devices.record_event(0)), "us")
        sheet.add("lending a tensor", median_of(lambda: cuda.wrap(tensor, devices)), "us")
        whole = median_of(lambda: hvd.allreduce_(tensor, op=hvd.Sum))
        sheet.add("allreduce_ of 4 KiB, from the call until it is launched and followed", whole, "us")
        sheet.add("allreduce_async_ of 4 KiB, the call alone", _async_alone(hvd, tensor), "us")
        empty = torch.empty(0)
        on_host = median_of(lambda: hvd.allreduce_(empty, op=hvd.Sum))
        sheet.add("the same negotiation without a GPU (host, no bytes)", on_host, "us")
    with sheet.part("NCCL"):
        plane: Any = runtime.devices
        lease = plane._leases[0].communicator
        pointer, stream = tensor.data_ptr(), plane._device.stream
        sheet.add("allReduce through CuPy, the call alone",
                  median_of(lambda: lease.allReduce(pointer, pointer, 1024, 7, 0, stream)), "us")
        events = plane._events
        sheet.add("recording an event", median_of(lambda: events.record(stream)), "us")
        event = events.record(stream)
        sheet.add("waiting for an event on a stream", median_of(lambda: plane._device.wait(stream, event.handle)), "us")
        sheet.add("asking an event", median_of(lambda: plane._device.is_event_done(event.handle)), "us")
    with sheet.part("gradients"):
        _instrumented(sheet, gpu)
    hvd.shutdown()


def _async_alone(hvd: Any, tensor: Any) -> float:
    times = []
    for _ in range(300):
        began = time.perf_counter()
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
        times.append(time.perf_counter() - began)
        hvd.synchronize(handle)
    return statistics.median(times) * 1e6


def _instrumented(sheet: Sheet, gpu: Any) -> None:
    """Measure what hooks, buckets and the wait at the end cost the host, on ResNet-50's gradients without its work."""
    import torch

    import hvdlite_torch as hvd
    from hvdlite.training.round_sequence import RoundSequence
    from hvdlite_torch.backward import BackwardHooks
    from hvdlite_torch.cuda_gradients import CudaGradients
    share_even_alone()
    parameters = [torch.nn.Parameter(torch.randn(shape, device=gpu) * 0.01) for shape in resnet_shapes()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.01), [
        (str(index), parameter) for index, parameter in enumerate(parameters)])
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*arguments, **options)
            finally:
                spent[name].append(time.perf_counter() - began)
        setattr(owner, name, call)

    def backward() -> float:
        optimizer.zero_grad()
        loss = sum((parameter.sum() for parameter in parameters), torch.zeros((), device=gpu))
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss.backward()
        return time.perf_counter() - began

    for _ in range(4):
        backward()
    assert optimizer._reducer.sequence.rounds.by_bucket, "buckets were never learned"
    buckets = len(optimizer._reducer.sequence.rounds.bucket_views.members)
    wrapped = [backward() for _ in range(20)]
    for owner, name in ((BackwardHooks, "_accumulated"), (CudaGradients, "fill_all"), (CudaGradients, "install_views"),
                        (CudaGradients, "filled"), (RoundSequence, "wait")):
        timed(owner, name)
    optimizer.zero_grad()
    for _ in range(20):
        backward()
    for parameter in parameters:
        parameter._post_accumulate_grad_hooks.clear()
    plain = [backward() for _ in range(20)]
    sheet.add("gradients", len(parameters))
    sheet.add("buckets", buckets)
    sheet.add("backward without hooks, 161 gradients", statistics.median(plain) * 1e3, "ms")
    sheet.add("backward with hooks, and the wait", statistics.median(wrapped) * 1e3, "ms")
    more = statistics.median(wrapped) - statistics.median(plain)
    sheet.add("more, per gradient", more / len(parameters) * 1e6, "us")
    for name, times in spent.items():
        sheet.add(f"host: {name}, each", statistics.median(times) * 1e6, "us")
        sheet.add(f"host: {name}, a step", sum(times) / 20 * 1e6, "us")


# --- against torch.distributed -------------------------------------------------------------------------------


def nccl(sheet: Sheet) -> None:
    """Reduce the same buffers through CuPy's NCCL and through torch's; two ranks, on one GPU or on two."""
    import torch
    gpu = one_gpu_each()
    import torch.distributed as dist

    import hvdlite_torch as hvd
    hvd.init()
    shared = torch.cuda.device_count() < SIZE
    sheet.note("what it means", "ranks share one GPU and take turns on it: only ratios mean anything, and little" if shared
               else "ranks have a GPU each")
    store = f"file://{os.environ['HVDLITE_JOB_DIRECTORY']}/store"
    dist.init_process_group("nccl", init_method=store, rank=RANK, world_size=SIZE, device_id=gpu)
    for length in (1 << 10, 1 << 18, 25 << 18) + ((1 << 26,) if not shared else ()):
        one, two = torch.ones(length, device=gpu), torch.ones(length, device=gpu)

        def ours(tensor: Any = one) -> None:
            hvd.allreduce_(tensor, op=hvd.Average)

        def theirs(tensor: Any = two) -> None:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        figures: dict[str, list[float]] = defaultdict(list)
        ways: Mapping[str, Callable[[], None]] = {"hvdlite": ours, "torch.distributed": theirs}
        with sheet.part(f"{length * 4} bytes"):
            for turn in range(7 if not shared else 5):
                for name, work in ways.items():
                    torch.cuda.synchronize()
                    hvd.barrier()
                    began = time.perf_counter()
                    for _ in range(3 if shared else 20):
                        work()
                    torch.cuda.synchronize()
                    if turn:
                        figures[name].append((time.perf_counter() - began) / (3 if shared else 20))
            for name, times in figures.items():
                sheet.add(f"allreduce of {length * 4 >> 10} KiB: {name}", statistics.median(times) * 1e3, "ms")
            assert (one == 1).all() and (two == 1).all()
    torch.cuda.synchronize()
    hvd.shutdown()
    dist.destroy_process_group()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{os.environ['HVDLITE_JOB_DIRECTORY']}/store")


CHECKS: dict[str, Callable[[Sheet], None]] = {"environment": environment, "pack": pack, "host": host, "training": training,
                                              "waits": waits, "nccl": nccl}


def main() -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # `gpu_check` asks before it ends what takes too long
    sheet = Sheet(Path(sys.argv[2]))
    sheet.write()
    try:
        CHECKS[sys.argv[1]](sheet)
    except BaseException:
        sheet.record["errors"]["all"] = traceback.format_exc()
        print(sheet.record["errors"]["all"], flush=True)
        sheet.write()
    sheet.write()
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    if left:
        sheet.note("threads left", left)
    sys.stdout.flush()
    os._exit(1 if sheet.record["errors"] else 0)  # what hangs at the end must not cost the figures; the tests look at that


if __name__ == "__main__":
    sys.exit(main())
