"""Stands for the module `cupy` and its arrays. See `tests/gpu_double/__init__.py`."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.gpu_double.kernels import RawKernelDouble


class ArrayDouble(np.ndarray):
    """Stands for `cupy.ndarray`."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:  # type: ignore[override]
        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            yield
        made = entered()
        made.id = 0  # type: ignore[attr-defined]
        return made


class StreamDouble(contextlib.nullcontext):  # type: ignore[type-arg]
    """Stands for CuPy's current stream."""

    ptr = 0


def on_gpu(values: Any) -> ArrayDouble:
    return np.array(values).view(ArrayDouble)


class CupyDouble:
    """Stands for `cupy`, in the process of a `GpuDouble`."""

    __version__ = "14.2.0"
    ndarray = ArrayDouble

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.cuda = types.SimpleNamespace(runtime=gpu, driver=gpu, nccl=gpu.nccl, get_current_stream=StreamDouble)

    def RawKernel(self, code: str, name: str, options: tuple[str, ...]) -> Any:
        return RawKernelDouble(self._gpu, self._gpu.kernels, code, name)

    def empty(self, shape: Any, dtype: Any) -> ArrayDouble:
        return np.empty(shape, dtype).view(ArrayDouble)

    def ascontiguousarray(self, array: Any) -> ArrayDouble:
        return on_gpu(array.copy("C"))
