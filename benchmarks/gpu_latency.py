"""The host's time for `gpu_check`: from "bucket full" to "NCCL enqueued", and several ranks beside DDP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from benchmarks.gpu_sheet import Setup, Sheet, add_percentiles, launch_times
from benchmarks.gpu_training import contest, images, kinds, makers, stepper


@contextlib.contextmanager
def gil_held() -> Iterator[None]:
    """Run a thread that computes in Python, and gives the GIL up only when others demand it."""
    stopped = threading.Event()

    def compute() -> None:
        while not stopped.is_set():
            sum(range(1000))
    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def measure_launches(sheet: Sheet, setup: Setup, step: Callable[[], None], name: str, steps: int) -> None:
    """Write down the time from "bucket full" to "NCCL enqueued" in training steps, idle and beside a busy thread."""
    import torch
    for what, beside, count in (("idle", contextlib.nullcontext(), steps),
                                ("beside a thread that holds the GIL", gil_held(), steps // 5)):
        with sheet.part(f"{name}, {what}"), launch_times() as seconds:
            with beside:
                for _ in range(setup.work.times(count, 2)):
                    step()
            torch.cuda.synchronize()
            add_percentiles(sheet, f"{name}, {what}", seconds)


def launch(sheet: Sheet, setup: Setup) -> None:
    """Measure the launches of one rank's buckets: of steps that the host limits, and of steps that the GPU limits."""
    gpu, work = setup.gpu(), setup.work
    import hvdlite_torch as hvd
    hvd.init()
    for name, batch, pixels, steps in (("small images", work.small_batch, work.small_pixels, 300),
                                       ("large images", work.batch, work.pixels, 100)):
        step = stepper(setup, "sharing", work.model, images(setup, gpu, batch, pixels))
        measure_launches(sheet, setup, step, name, steps)
    hvd.shutdown()


def several_ranks(sheet: Sheet, setup: Setup) -> None:
    """Compare the host's time of a step with DDP's, and measure launches, where other ranks take part."""
    import torch
    gpu, work = setup.gpu(), setup.work
    import hvdlite_torch as hvd
    hvd.init()
    sheet.note("what it means", "ranks share one GPU and take turns on it: only the host's time means anything"
               if torch.cuda.device_count() < setup.size else "ranks have a GPU each")
    setup.join_torch(gpu)
    data = images(setup, gpu, work.small_batch, work.small_pixels)
    of = [kind for kind in kinds() if kind != "sharing"]
    contest(sheet, f"small resnet50, {setup.size} ranks", makers(setup, of, work.model, data), work.times(4), work.times(3))
    hvd.barrier()
    measure_launches(sheet, setup, stepper(setup, "wrapped", work.model, data), f"{setup.size} ranks", 75)
    hvd.shutdown()
    setup.leave_torch()
