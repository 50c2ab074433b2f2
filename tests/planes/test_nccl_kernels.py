"""The CUDA kernels, compiled for the host: the same source, block by block and thread by thread."""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.core.array import BFLOAT16, SUPPORTED_DTYPES, identity
from hvdlite.core.device import DeviceArray
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.planes.nccl import kernels
from tests.gpu_double.kernels import calculated

COMPILER = shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler to run the kernel's source on the host")

_HOST = """
#include <math.h>
#define __global__
#define __device__ static
#define __grid_constant__
#define __launch_bounds__(n)
struct Index { unsigned int x; };
static Index blockIdx, threadIdx;
static float host_from_float16(unsigned short x) { _Float16 y; __builtin_memcpy(&y, &x, 2); return (float)y; }
static unsigned short host_to_float16(float x) {
    _Float16 y = (_Float16)x; unsigned short bits; __builtin_memcpy(&bits, &y, 2); return bits; }
"""
_MAIN = """
extern "C" int table_size() { return (int)sizeof(TABLE); }
extern "C" void run(const TABLE* table, int blocks, int threads) {
    for (blockIdx.x = 0; blockIdx.x < (unsigned)blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < (unsigned)threads; threadIdx.x++) NAME(*table);
}
"""

Move = Callable[..., None]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Any]]:
    made: dict[str, Any] = {}
    directory = tmp_path_factory.mktemp("kernels")

    def compile_for(code: str, table: str = "Table") -> Any:
        if code not in made:
            path = directory / f"{len(made)}.cpp"
            main = _MAIN.replace("NAME", kernels.NAME).replace("TABLE", table)
            path.write_text(_HOST + code + main, encoding="utf-8")
            library = path.with_suffix(".so")
            assert COMPILER is not None
            subprocess.run([COMPILER, "-O0", "-std=c++17", "-w", "-shared", "-fPIC", "-o", str(library), str(path)],
                           check=True)
            made[code] = ctypes.CDLL(str(library))
        return made[code]
    yield compile_for


def move(compiled: Any, copies: list[tuple[int, int, int]], source: str, target: str, factor: float = 1.0,
         fill_value: int = 0) -> int:
    """Do what `CupyDevice.move` does; return the number of launches."""
    library = compiled(kernels.source_code(source, target, factor != 1.0))
    assert library.table_size() == kernels.TABLE.itemsize
    launches = 0
    for table in kernels.tables(copies, kernels.chunk(source, target), factor, fill_value):
        entry = table[0]
        library.run(ctypes.c_void_p(table.ctypes.data), int(entry["first"][entry["entries"]]), kernels.THREADS)
        launches += 1
    return launches


def sample(dtype: np.dtype[Any], count: int, seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    if dtype.kind in "iu":
        return generator.integers(0 if dtype.kind == "u" else -100, 100, count).astype(dtype)
    return generator.normal(size=count).astype(np.float32).astype(dtype)


def shifted(array: Any, by: int) -> Any:
    """Return a copy of an array that begins `by` elements after an aligned address."""
    room = np.zeros(array.nbytes + 512, np.uint8)
    begin = -room.ctypes.data % 256 + by * array.itemsize
    out = room[begin:begin + array.nbytes].view(array.dtype)
    out[...] = array
    return out


NAMES = [name for name in SUPPORTED_DTYPES if name != "bool" and "complex" not in name]
COUNTS = (1, 3, 4, 1000, 4096, 4097, 20_011)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shift", [0, 1])
def test_copies_bits(compiled: Any, dtype: str, shift: int) -> None:
    sources = [shifted(sample(SUPPORTED_DTYPES[dtype], count, count), shift) for count in (*COUNTS, 0)]
    targets = [shifted(np.zeros_like(source), shift * 2) for source in sources]
    copies = [(source.ctypes.data, target.ctypes.data, source.size) for source, target in zip(sources, targets, strict=True)]
    assert move(compiled, copies, dtype, dtype) == 1
    for source, target in zip(sources, targets, strict=True):
        assert source.tobytes() == target.tobytes()


@pytest.mark.parametrize("source", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3])
def test_casts_and_calculates_like_the_host(compiled: Any, source: str, target: str, factor: float) -> None:
    values = shifted(sample(SUPPORTED_DTYPES[source], 5003), 0)
    if source in ("float16", "float32", "bfloat16"):
        values[:4] = [np.inf, -np.inf, np.nan, 0.0]
    out = shifted(np.zeros(values.size, SUPPORTED_DTYPES[target]), 0)
    move(compiled, [(values.ctypes.data, out.ctypes.data, values.size)], source, target, factor)
    expected = calculated(values, factor, out.dtype)
    wide = np.float64
    step = {"float16": 2e-3, "bfloat16": 1e-2}.get(target, 1e-6)
    np.testing.assert_allclose(out.astype(wide), expected.astype(wide), rtol=0 if factor == 1.0 else step)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_integers_are_truncated_toward_zero_in_place(compiled: Any, dtype: str) -> None:
    for factor in (0.5, 1 / 3, 2 / 7):
        values = shifted(sample(SUPPORTED_DTYPES[dtype], 4099) // 2, 0)
        expected = calculated(values.copy(), factor, values.dtype)
        move(compiled, [(values.ctypes.data, values.ctypes.data, values.size)], dtype, dtype, factor)
        assert np.array_equal(values, expected), factor


@pytest.mark.parametrize("dtype", NAMES)
def test_fills_with_the_identity(compiled: Any, dtype: str) -> None:
    kind = SUPPORTED_DTYPES[dtype]
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        out = shifted(sample(kind, 777), 1)
        value = identity(op, kind)
        move(compiled, [(0, out.ctypes.data, out.size)], dtype, dtype, 1.0, kernels.bits(value, kind))
        expected = np.full(777, np.float32(value)).astype(kind) if kind == BFLOAT16 else np.full(777, value, kind)
        assert out.tobytes() == expected.tobytes(), op


def test_many_arrays_take_as_few_launches_as_tables_fit(compiled: Any) -> None:
    sources = [sample(np.dtype(np.float32), 1 + index % 97, index) for index in range(3 * kernels.ENTRIES + 1)]
    targets = [np.zeros_like(source) for source in sources]
    copies = [(source.ctypes.data, target.ctypes.data, source.size) for source, target in zip(sources, targets, strict=True)]
    assert move(compiled, copies, "float32", "float32") == 4
    assert all(np.array_equal(source, target) for source, target in zip(sources, targets, strict=True))
    assert not list(kernels.tables([], 1024))


@pytest.mark.parametrize(("shape", "strides"), [
    ((2, 3, 4), (12, 1, 3)), ((5, 1, 7, 3), (21, 21, 1, 7)), ((300, 70), (1, 300)), ((4,), (1,)), ((), ()),
    ((3, 0), (1, 3))])
def test_layouts_become_row_major(compiled: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    for name in ("uint8", "bfloat16", "float32", "int64", "complex128"):
        values = np.arange(max(1, int(np.prod(shape))) * 2).astype(np.float32).astype(SUPPORTED_DTYPES[name])
        out = np.zeros(int(np.prod(shape)), values.dtype)
        library = compiled(kernels.row_major_code(values.itemsize), "Layout")
        assert library.table_size() == kernels.LAYOUT.itemsize
        source = DeviceArray(values.ctypes.data, shape, values.dtype, 0, strides=strides)
        table, blocks = kernels.layout(source, DeviceArray(out.ctypes.data, shape, values.dtype, 0))
        library.run(ctypes.c_void_p(table.ctypes.data), blocks, kernels.THREADS)
        expected = np.lib.stride_tricks.as_strided(values, shape, tuple(step * values.itemsize for step in strides))
        assert out.tobytes() == np.ascontiguousarray(expected).tobytes(), name
    with pytest.raises(UnsupportedError, match="17 dimensions"):
        kernels.layout(DeviceArray(0, (1,) * 17, values.dtype, 0, strides=(1,) * 17), source)


def test_the_table_fits_the_parameters_of_every_cuda_version() -> None:
    assert max(kernels.TABLE.itemsize, kernels.LAYOUT.itemsize) <= 4096 - 8


def test_large_arrays_have_the_right_number_of_blocks() -> None:
    big = 3 << 30
    (table,) = kernels.tables([(256, 512, 7), (256, 512, big), (0, 1, 5)], 4096)
    entry = table[0]
    assert entry["count"][1] == big
    assert list(entry["first"][:4]) == [0, 1, 1 + big // 4096, 2 + big // 4096]


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("pair", [("float32", "float32"), ("float32", "bfloat16"), ("float16", "float32"),
                                  ("int64", "int64"), ("float64", "float16"), ("uint8", "uint8")])
def test_nvrtc_takes_the_source(pair: tuple[str, str], scaling: bool) -> None:
    compiler = pytest.importorskip("cupy.cuda.compiler", reason="needs CuPy")
    from cupy_backends.cuda.libs import nvrtc
    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy raises many kinds
        pytest.skip(f"needs NVRTC: {error}")
    core = importlib.import_module("cupy._core.core")
    options = core.assemble_cupy_compiler_options(("--std=c++17",))  # finds CUDA's headers
    for code in (kernels.source_code(*pair, scaling), kernels.row_major_code(SUPPORTED_DTYPES[pair[0]].itemsize)):
        program = compiler._NVRTCProgram(code, "kernel.cu")
        binary, _ = program.compile((*options, "-arch=sm_90"))
        assert kernels.NAME.encode() in binary


def test_the_extras_bring_what_cupy_compiles_kernels_with() -> None:
    text = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    for cuda, packages in (("12", ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12")),
                           ("13", ("nvidia-cuda-nvrtc>=13,<14", "nvidia-cuda-runtime>=13,<14"))):
        extra = text.partition(f'"nccl-cuda{cuda}": [')[2].partition("]")[0]
        assert all(f'"{package}"' in extra for package in packages), extra


def test_headers_and_nvrtc_come_from_the_same_wheels() -> None:
    """CUDA's headers of another installation need not fit the NVRTC that compiles."""
    pytest.importorskip("cupy", reason="needs CuPy")
    core, pathfinder = (importlib.import_module(name) for name in ("cupy._core.core", "cuda.pathfinder"))
    headers = [option.removeprefix("-I") for option in core.assemble_cupy_compiler_options(())
               if option.startswith("-I") and "/cupy/" not in option]
    assert [path for path in headers if (Path(path) / "vector_types.h").is_file()], headers
    nvrtc = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    assert all(nvrtc.parents[2] in Path(path).parents for path in headers), (nvrtc, headers)
