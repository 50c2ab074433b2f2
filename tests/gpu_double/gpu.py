"""One rank's GPU. See `tests/gpu_double/__init__.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite.planes.nccl.cupy_device import CupyDevice
from hvdlite.planes.nccl.plane import NcclPlane
from tests.gpu_double.cuda import CudaDouble
from tests.gpu_double.cupy import CupyDouble
from tests.gpu_double.nccl import Meetings, NcclDouble


class _Device(CupyDevice):
    """The real one, on a double instead of what is installed."""

    def __init__(self, gpu: GpuDouble, index: int) -> None:
        self._open(gpu.cupy, gpu, index)  # type: ignore[arg-type]


class GpuDouble(CudaDouble):
    """CUDA, NCCL and CuPy in one process, with a GPU that is used.

    Attributes:
        kernels: whether kernels can be compiled.
        nccl: the module `cupy.cuda.nccl`.
        cupy: the module `cupy`.
        device: the GPU as the plane uses it.

    Args:
        meetings: where its communicators find those of other ranks.
    """

    def __init__(self, index: int = 0, meetings: Meetings | None = None) -> None:
        super().__init__()
        self.kernels = True
        self.nccl = NcclDouble(self, meetings or Meetings())
        self.cupy = CupyDouble(self)
        self.device = _Device(self, index)

    @property
    def stream(self) -> int:
        """The plane's stream."""
        return self.device.stream

    def held(self) -> dict[str, int]:
        return {**super().held(), "communicators": sum(not each.ended for each in self.nccl.communicators)}


def plane(rank: int, oob: Any, wake: Callable[[], None], gpu: GpuDouble, **options: Any) -> NcclPlane:
    """Return the real plane over a double of a GPU."""
    return NcclPlane(rank, "host", oob, wake, lambda index: gpu.device, lambda: "", **{"exit_timeout": 0.0, **options})
