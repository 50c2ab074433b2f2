"""Stands for `cupy.RawKernel`: a kernel is known by its source, and done with NumPy. See `tests/gpu_double/__init__.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.core.array import BFLOAT16, SUPPORTED_DTYPES, accumulator_dtype
from hvdlite.planes.nccl import kernels
from tests.gpu_double.cuda import CudaDouble, view

Work = Callable[[Any], None]
"""Does what a kernel does, by the table that it is launched with."""


class RawKernelDouble:
    """A kernel of `hvdlite.planes.nccl.kernels`; others cannot be compiled."""

    def __init__(self, cuda: CudaDouble, works: bool, code: str, name: str) -> None:
        assert name == kernels.NAME
        self._cuda, self._works = cuda, works
        self._what, self._work = _by_source()[code]

    def compile(self) -> None:
        if not self._works:
            raise RuntimeError("there is no NVRTC")

    @property
    def kernel(self) -> Callable[..., None]:
        """The function that launches it."""
        return self._launch

    def _launch(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any], shared: int, stream: Any) -> None:
        self._cuda.use(stream.ptr)
        (table,) = arguments
        entry = table.copy()[0]  # it is passed by value
        assert block == (kernels.THREADS,) and shared == 0
        if self._what == "move":
            assert grid == (entry["first"][entry["entries"]],)
        self._cuda.launch(stream.ptr, self._what, lambda: self._work(entry))


@functools.cache
def _by_source() -> dict[str, tuple[str, Work]]:
    """Return the name and the work of each kernel, by its source."""
    found: dict[str, tuple[str, Work]] = {}
    for name, dtype in SUPPORTED_DTYPES.items():
        if dtype.itemsize <= 8:
            bits = np.dtype(f"u{dtype.itemsize}")
            found[kernels.source_code(name, name, False)] = "move", functools.partial(_move, bits, bits)
    numbers = [name for name, dtype in SUPPORTED_DTYPES.items() if dtype.kind not in "bc"]
    for source in numbers:
        for target in numbers:
            work = functools.partial(_move, SUPPORTED_DTYPES[source], SUPPORTED_DTYPES[target])
            for scales in (False, True):
                if source != target or scales:
                    found[kernels.source_code(source, target, scales)] = "move", work
    for width in (1, 2, 4, 8, 16):
        found[kernels.row_major_code(width)] = "arrange", functools.partial(_arrange, width)
    return found


def _move(source: np.dtype[Any], target: np.dtype[Any], table: Any) -> None:
    for index in range(table["entries"]):
        origin, place, count = (int(table[name][index]) for name in ("source", "target", "count"))
        out = view(place, count, target)
        if origin == 0:
            out[...] = np.array([table["filler"]]).view(np.uint8)[:out.itemsize].view(target)
        else:
            out[...] = calculated(view(origin, count, source).copy(), float(table["factor"]), target)


def _arrange(width: int, table: Any) -> None:
    count, rank = int(table["count"]), int(table["dimensions"])
    unit, parts = np.dtype(f"u{min(width, 8)}"), -(-width // 8)
    places = table["strides"][:rank] @ np.indices(table["shape"][:rank]).reshape(rank, count)
    elements = view(int(table["source"]), (int(places.max(initial=0)) + 1) * parts, unit).reshape(-1, parts)
    view(int(table["target"]), count * parts, unit).reshape(-1, parts)[...] = elements[places]


def calculated(values: Any, factor: float, dtype: np.dtype[Any]) -> Any:
    """Do what the kernel does, with NumPy."""
    with np.errstate(all="ignore"):
        if values.dtype.kind in "iu":
            return (values if factor == 1.0 else np.trunc(values.astype(np.float64) * factor)).astype(dtype)
        wide = values.astype(accumulator_dtype(values.dtype))
        if factor != 1.0:
            wide = wide * wide.dtype.type(factor)
        return (wide.astype(np.float32) if dtype == BFLOAT16 else wide).astype(dtype)
