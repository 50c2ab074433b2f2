"""What the checks of `gpu_check` share: the sheet they write figures on, the GPU they use, and how much work they do.

Tests run the checks on the CPU, with another `Setup` and less work: `tests/house/gpu_stand_in.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ARTIFACTS = "GPU_CHECK_ARTIFACTS"
"""The variable that names the directory for traces."""


class Sheet:
    """The figures of one check, written to a file as soon as each is known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.record: dict[str, Any] = {"figures": [], "notes": {}, "errors": {}}

    def add(self, name: str, value: float | int | str, unit: str = "") -> None:
        self.record["figures"].append({"name": name, "value": value, "unit": unit})
        self.write()

    def note(self, name: str, text: Any) -> None:
        self.record["notes"][name] = text
        self.write()

    def write(self) -> None:
        self._path.write_text(json.dumps(self.record, default=str), encoding="utf-8")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record what goes wrong inside, and go on."""
        try:
            yield
        except Exception:
            self.record["errors"][name] = traceback.format_exc()
            print(f"{name}: {self.record['errors'][name]}", flush=True)
            self.write()


def resnet50() -> Any:
    try:
        import torchvision
        return torchvision.models.resnet50()
    except Exception:
        from examples import resnet
        return resnet.resnet50()


def many_layers() -> Any:
    """Return a model of 64 small gradients, 8 MB."""
    import torch
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(31)]
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(16), torch.nn.Flatten(), torch.nn.Linear(768, 256), *layers,
                               torch.nn.Linear(256, 1000))


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


@dataclasses.dataclass(frozen=True)
class Work:
    """How much the checks do.

    Attributes:
        divisor: by which numbers of repetitions are divided.
        shrink: by which numbers of elements are divided.
        batch, pixels: of a step that the GPU limits.
        small_batch, small_pixels: of a step that the host limits.
    small_model: what ranks train that may share a GPU, and then send gradients over TCP.
    """

    model: Callable[[], Any] = resnet50
    shapes: Callable[[], Sequence[tuple[int, ...]]] = resnet_shapes
    divisor: int = 1
    shrink: int = 1
    batch: int = 64
    pixels: int = 224
    small_batch: int = 2
    small_pixels: int = 64
    small_model: Callable[[], Any] = many_layers

    def times(self, count: int, least: int = 1) -> int:
        """Return how often to do something that is done `count` times on a GPU."""
        return max(least, count // self.divisor)

    def elements(self, count: int) -> int:
        """Return the length of a tensor that has `count` elements on a GPU."""
        return max(4, count // self.shrink)


class Setup:
    """This rank, its GPU, and the amount of work."""

    def __init__(self, rank: int, size: int, work: Work | None = None) -> None:
        self.rank, self.size, self.work = rank, size, work or Work()

    def gpu(self) -> Any:
        """Choose this rank's GPU; several ranks on one are hosts of their own to NCCL, which then uses TCP."""
        import torch
        gpus = torch.cuda.device_count()
        if not gpus:
            raise RuntimeError(f"torch {torch.__version__} sees no GPU")
        if gpus < self.size:
            os.environ.update(NCCL_HOSTID=f"r{self.rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_ALGO="Ring",
                              NCCL_PROTO="Simple", NCCL_MAX_CTAS="2", HVDLITE_SHARED_GPU="1")
        torch.cuda.set_device(self.rank % gpus)
        return torch.device("cuda", torch.cuda.current_device())

    def device(self, index: int) -> Any:
        """Return a GPU as the plane uses it, current on this thread."""
        from hvdlite.planes.nccl.cupy_device import CupyDevice
        device = CupyDevice(index, 0, {})
        device.make_current()
        return device

    def malloc(self, nbytes: int) -> int:
        """Return the address of so many bytes of the GPU's, all 1; they are never freed."""
        from cupy.cuda import runtime
        pointer = int(runtime.malloc(nbytes))
        runtime.memset(pointer, 1, nbytes)
        runtime.deviceSynchronize()
        return pointer

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Wait for the GPU; return what is there."""
        import numpy as np
        from cupy.cuda import runtime
        runtime.deviceSynchronize()
        found = np.empty(nbytes, np.uint8)
        runtime.memcpy(found.ctypes.data, pointer, nbytes, runtime.memcpyDeviceToHost)
        return found.tobytes()

    def join_torch(self, gpu: Any) -> None:
        """Initialise torch.distributed with NCCL."""
        import torch.distributed as dist
        if self.size == 1:
            self._store.unlink(missing_ok=True)
        dist.init_process_group("nccl", init_method=f"file://{self._store}", rank=self.rank, world_size=self.size,
                                device_id=gpu)

    def leave_torch(self) -> None:
        import torch.distributed as dist
        dist.destroy_process_group()
        self._store.unlink(missing_ok=True)

    @property
    def _store(self) -> Path:
        return Path(os.environ.get("HVDLITE_JOB_DIRECTORY", tempfile.gettempdir())) / f"torch-store-{os.getppid()}"

    def path(self) -> dict[str, Any]:
        """Return which NCCL reduces, and how: without it a figure means little."""
        import torch

        from hvdlite.planes.nccl import library
        nccl = library.load(dict(os.environ)).cuda.nccl
        return {"NCCL": library.version_text(nccl.get_version()), "files": sorted(library.copies()),
                "ranks": self.size, "ranks share a GPU": torch.cuda.device_count() < self.size,
                "settings": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}}

    @property
    def artifacts(self) -> Path | None:
        """Where traces are kept."""
        return Path(directory) if (directory := os.environ.get(ARTIFACTS)) else None

    def ddp(self, model: Any, **options: Any) -> Any:
        """Return a model wrapped in torch's DistributedDataParallel."""
        import torch
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


@contextlib.contextmanager
def sharing_alone() -> Iterator[None]:
    """Let optimizers that are wrapped inside exchange gradients also in a job of one rank."""
    from hvdlite.training.gradients.reducer import Reducer
    real = Reducer.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        self.is_shared = True
    Reducer.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Reducer.__init__ = real  # type: ignore[method-assign]


def has_learned(optimizer: Any) -> bool:
    """Return whether a wrapped optimizer's gradients are reduced in buckets."""
    return bool(optimizer._hooks.reducer.layout.is_used)


class CommunicatorProxy:
    """A communicator whose `allReduce` does something else too."""

    def __init__(self, real: Any, all_reduce: Callable[..., None]) -> None:
        self._real, self.allReduce = real, all_reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def replaced_all_reduce(replacement: Callable[..., None]) -> Iterator[None]:
    """Call `replacement(real, source, target, count, dtype, op, stream)` for NCCL's all-reduce of the global process set.

    Its communicator must exist.
    """
    from hvdlite import api
    plane: Any = api.runtime().devices
    ref = plane._communicators.refs[0]
    real = ref.communicator
    ref.communicator = CommunicatorProxy(real, lambda *arguments: replacement(real.allReduce, *arguments))
    try:
        yield
    finally:
        ref.communicator = real


class Launched(NamedTuple):
    """When a bucket was full on this rank, and when NCCL's all-reduce of it was enqueued; in seconds of the host's clock."""

    full: float
    enqueued: float


@contextlib.contextmanager
def launch_times() -> Iterator[list[Launched]]:
    """Yield a list that gets the times of each bucket's launch."""
    from hvdlite import api
    full: dict[int, float] = {}  # by the address of the bucket
    launched: list[Launched] = []
    runtime: Any = api.runtime()
    enqueue = runtime.gradients.enqueue_bucket

    def enqueue_bucket(bucket: Any, *arguments: Any, **options: Any) -> Any:
        full[bucket.memory.pointer] = time.perf_counter()
        return enqueue(bucket, *arguments, **options)

    def all_reduce(real: Any, source: int, target: int, *rest: Any) -> None:
        real(source, target, *rest)
        began = full.pop(target, None)
        if began is not None:
            launched.append(Launched(began, time.perf_counter()))
    runtime.gradients.enqueue_bucket = enqueue_bucket
    try:
        with replaced_all_reduce(all_reduce):
            yield launched
    finally:
        runtime.gradients.enqueue_bucket = enqueue


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def add_percentiles(sheet: Sheet, name: str, seconds: Sequence[float]) -> None:
    """Write down the median and the 99th percentile of seconds, in microseconds."""
    sheet.add(f"{name}: p50", statistics.median(seconds) * 1e6, "us")
    sheet.add(f"{name}: p99", percentile(seconds, 0.99) * 1e6, "us")
    sheet.add(f"{name}: samples", len(seconds))
