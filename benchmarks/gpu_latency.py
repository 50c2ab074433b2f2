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
    """Write down the time from "bucket full", on all ranks, to "NCCL enqueued" in training steps, idle and beside a thread
    that computes."""
    import torch

    import hvdlite_torch as hvd
    for what, beside, count in (("idle", contextlib.nullcontext(), steps),
                                ("beside a thread that holds the GIL", gil_held(), max(2, steps // 50))):
        with sheet.part(f"{name}, {what}"), launch_times() as mine:
            with beside:
                for _ in range(setup.work.times(count, 2)):
                    step()
            torch.cuda.synchronize()
            ranks = hvd.allgather_object(mine)  # in the same order: ranks of one host have one clock
            add_percentiles(sheet, f"{name}, {what}", [
                launched.enqueued - max(each.full for each in everybody)
                for launched, everybody in zip(mine, zip(*ranks, strict=True), strict=True)])


def launch(sheet: Sheet, setup: Setup) -> None:
    """Measure the launches of one rank's buckets: of steps that the host limits, and of steps that the GPU limits."""
    gpu, work = setup.gpu(), setup.work
    import hvdlite_torch as hvd
    hvd.init()
    for name, batch, pixels, steps in (("small images", work.small_batch, work.small_pixels, 100),
                                       ("large images", work.batch, work.pixels, 50)):
        step = stepper(setup, "sharing", work.model, images(setup, gpu, batch, pixels))
        measure_launches(sheet, setup, step, name, steps)
    hvd.shutdown()


def several_ranks(sheet: Sheet, setup: Setup) -> None:
    """Compare a step with DDP's, and measure launches, where other ranks take part."""
    gpu, work = setup.gpu(), setup.work
    import hvdlite_torch as hvd
    data = images(setup, gpu, work.small_batch, work.small_pixels)
    of = [kind for kind in kinds() if kind not in ("plain", "sharing")]
    setup.join_torch(gpu)
    hvd.init()
    contest(sheet, "many layers", makers(setup, of, work.small_model, data), work.times(20), work.times(9))
    measure_launches(sheet, setup, stepper(setup, "wrapped", work.small_model, data), "launches", 100)
    sheet.note("path", setup.path())
    hvd.shutdown()
    setup.leave_torch()
