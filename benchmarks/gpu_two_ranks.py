"""The heart of the GPU path for `gpu_check`: NCCL reduces gradients, with delays in every place; and one step's kernels."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu_sheet import Setup, Sheet, has_learned, replaced_all_reduce

STEPS = 8
CYCLES = 20_000_000
"""Of a delay; about 10 ms."""
TRACE = "two-ranks.json.gz"
RATE = 0.01


class Kernel(NamedTuple):
    """One run of a kernel; times in microseconds."""

    name: str
    begin: float
    end: float

    @property
    def library(self) -> str:
        """Whose it is: "nccl", "hvdlite", "optimizer" or "torch"."""
        for mark, library in (("ncclDevKernel", "nccl"), ("hvdlite", "hvdlite"), ("multi_tensor_apply", "optimizer")):
            if mark in self.name:
                return library
        return "torch"


def kernels_within(events: Any) -> list[Kernel]:
    """Return the kernels that the profiler saw on the GPU, in order."""
    from torch.autograd import DeviceType
    found = [Kernel(event.name, event.time_range.start, event.time_range.end) for event in events
             if event.device_type == DeviceType.CUDA and not event.name.startswith(("Mem", "hvdlite."))]
    return sorted(found, key=lambda kernel: kernel.begin)


class Twins:
    """A model that all ranks train with their parts of each batch, and one that this rank trains with whole batches."""

    def __init__(self, setup: Setup, gpu: Any) -> None:
        import torch

        import hvdlite_torch as hvd
        self._width, self._gpu, self._rank, self._size = setup.work.elements(1024), gpu, setup.rank, setup.size
        self.ours, self._whole = self._model(), self._model()
        self.optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(self.ours.parameters(), RATE, 0.9),
                                                       self.ours.named_parameters())
        self._alone = torch.optim.SGD(self._whole.parameters(), RATE, 0.9)
        self._steps = 0

    def _model(self) -> Any:
        import torch
        model = torch.nn.Sequential(*[torch.nn.Linear(self._width, self._width) for _ in range(8)])
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=self._width ** -0.5, generator=generator)
        return model.to(self._gpu)

    def batch(self) -> Any:
        import torch
        generator = torch.Generator().manual_seed(self._steps)
        return torch.randn(self._size, 32, self._width, generator=generator).to(self._gpu)

    def step(self, before_step: Callable[[], None] = lambda: None) -> None:
        """Train both."""
        batch = self.batch()
        self.step_together(batch[self._rank], before_step)
        self._alone.zero_grad()
        sum(self._whole(part).square().mean() for part in batch).div(self._size).backward()
        self._alone.step()
        self._steps += 1

    def step_together(self, part: Any, before_step: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        self.ours(part).square().mean().backward()
        before_step()
        self.optimizer.step()

    def check(self) -> None:
        """Compare the models' parameters."""
        import torch
        for mine, other in zip(self.ours.parameters(), self._whole.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)

    def first_of_buckets(self) -> Sequence[Any]:
        """Return the parameter of each learned bucket that has its gradient last."""
        return [plan.parameters[-1] for plan in self.optimizer._hooks.reducer.layout.plans]


def two_ranks(sheet: Sheet, setup: Setup) -> None:
    """Compare training on several ranks with one rank's, without and with delays; look at the kernels of a step."""
    import torch
    gpu = setup.gpu()
    import hvdlite_torch as hvd
    hvd.init()
    twins = Twins(setup, gpu)
    for _ in range(STEPS):
        twins.step()
    assert has_learned(twins.optimizer), "buckets were never learned"
    sheet.note("path", setup.path())
    with sheet.part("equal to one rank"):
        twins.check()
        sheet.add(f"equal to one rank after {STEPS} steps", "yes")

    def delay() -> None:
        torch.cuda._sleep(CYCLES)

    def on(stream: int) -> Any:
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=gpu))

    @contextlib.contextmanager
    def before_pack() -> Iterator[None]:
        """The gradients come late: whoever packs them too early sends other values."""
        def late(gradient: Any) -> Any:
            delay()
            return gradient * 1.0
        hooks = [parameter.register_hook(late) for parameter in twins.first_of_buckets()]
        yield
        for hook in hooks:
            hook.remove()

    def around(before: bool, after: bool) -> Any:
        def all_reduce(real: Any, *arguments: Any) -> None:
            for is_due, work in ((before, delay), (True, lambda: real(*arguments)), (after, delay)):
                if is_due:
                    with on(arguments[-1]):
                        work()
        return replaced_all_reduce(all_reduce)

    for name, context, before_step in (
            ("before the pack", before_pack(), lambda: None), ("before the all-reduce", around(True, False), lambda: None),
            ("after the all-reduce", around(False, True), lambda: None),
            ("before the step", contextlib.nullcontext(), delay)):
        with sheet.part(f"a delay {name}"), context:
            for _ in range(3):
                twins.step(before_step)
            twins.check()
            sheet.add(f"equal to one rank with a delay {name}", "yes")
    with sheet.part("kernels"):
        look(sheet, setup, twins)
    torch.cuda.synchronize()
    hvd.shutdown()


def look(sheet: Sheet, setup: Setup, twins: Twins) -> None:
    """Record the kernels of one step of rank 0: how many, how long, and what the communication overlaps with."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    import hvdlite_torch as hvd
    part, trace = twins.batch()[setup.rank], None
    for _ in range(2):  # the first profile loads its library
        torch.cuda.synchronize()
        hvd.barrier()
        if setup.rank == 0:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                twins.step_together(part)
                torch.cuda.synchronize()
        else:
            twins.step_together(part)
    if trace is None:
        return
    if setup.artifacts is not None:
        trace.export_chrome_trace(str(setup.artifacts / TRACE))
        sheet.note("trace", TRACE)
    buckets = len(twins.optimizer._hooks.reducer.layout.plans)
    sheet.add("buckets", buckets)
    found = kernels_within(trace.events())
    for library in ("nccl", "hvdlite"):
        mine = [kernel for kernel in found if kernel.library == library]
        sheet.add(f"kernels of {library}", len(mine))
        sheet.add(f"kernels of {library}, time", sum(kernel.end - kernel.begin for kernel in mine) / 1e3, "ms")
        sheet.note(f"kernels of {library}", Counter(kernel.name for kernel in mine))
    reductions = [kernel for kernel in found if kernel.library == "nccl"]
    assert len(reductions) == buckets, f"{len(reductions)} kernels of NCCL's reduced {buckets} buckets"
    backward = max(kernel.end for kernel in found if kernel.library == "torch")
    early = sum(kernel.begin < backward for kernel in reductions)
    sheet.add("from the first kernel of the step to the backward pass's last", (backward - found[0].begin) / 1e3, "ms")
    sheet.add("from it to the first all-reduce", (reductions[0].begin - found[0].begin) / 1e3, "ms")
    sheet.add("all-reduces that began before the backward pass ended on the GPU", early, f"of {buckets}")
