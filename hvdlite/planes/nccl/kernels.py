"""CUDA kernels: one copies, casts, scales or fills many arrays at once; one makes an array row-major.

The table of arrays is a kernel parameter, passed by value (below the 4 KiB that every CUDA version permits), so no table
must be uploaded or kept alive. A block finds its array by bisection over the arrays' first blocks: large and small arrays
share one launch without idle blocks. Horovod's `cuda_kernels.cu` batches copies in the same way.

The source is plain C++ except for three macros and two conversions, so that tests can compile and run it on the host.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from hvdlite.core.array import BFLOAT16, SUPPORTED_DTYPES, Array
from hvdlite.core.device import CopySpec, DeviceArray
from hvdlite.core.errors import UnsupportedError

ENTRIES = 128
THREADS = 256
UNROLL = 4
NAME = "hvdlite_move"
DIMENSIONS = 16
NEEDED = "need CUDA kernels, which cannot be compiled here: install NVRTC (pip install 'cupy-cuda12x[ctk]', or 13x)"

TABLE = np.dtype([
    ("source", np.uint64, ENTRIES), ("target", np.uint64, ENTRIES), ("count", np.int64, ENTRIES),
    ("first", np.int32, ENTRIES + 1), ("entries", np.int32), ("factor", np.float64), ("filler", np.uint64)])
"""Laid out as `struct Table` below; `first[i]` is the first block of array i, `first[entries]` the number of blocks."""
LAYOUT = np.dtype([("source", np.uint64), ("target", np.uint64), ("count", np.int64), ("dimensions", np.int64),
                   ("shape", np.int64, DIMENSIONS), ("strides", np.int64, DIMENSIONS)])
"""Laid out as `struct Layout` below; strides are the source's, in elements."""

_UNITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_STORED = {"int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short", "int32": "int",
           "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long", "float16": "unsigned short",
           "bfloat16": "unsigned short", "float32": "float", "float64": "double"}


def source_code(source: str, target: str, scales: bool) -> str:
    """Return the CUDA source of the copy kernel for two dtypes; if it neither scales nor casts, it copies bits.

    Values are multiplied by a factor; integers are truncated toward zero. CuPy compiles with -ftz=true: float32 values below
    1.2e-38 become zero.
    """
    if source == target and not scales:
        width = SUPPORTED_DTYPES[source].itemsize
        unsigned = _UNITS[width]
        stored, loaded, value = (unsigned, unsigned), "x", "x"
        wide, length = unsigned, 16 // width
    else:
        stored = (_STORED[source], _STORED[target])
        integers = "int" in source
        wide = "long long" if integers and "u" not in source else "unsigned long long" if integers else \
            "double" if "float64" in (source, target) else "float"
        loaded = f"from_{source}(x)" if source in ("float16", "bfloat16") else f"({wide})x"
        value = "y"
        if scales:
            value = "(wide)((double)y * table.factor)" if integers else "(y * (wide)table.factor)"
        value = f"to_{target}((float){value})" if target in ("float16", "bfloat16") else f"({stored[1]}){value}"
        length = 16 // max(SUPPORTED_DTYPES[source].itemsize, SUPPORTED_DTYPES[target].itemsize)
    return _SOURCE.format(entries=ENTRIES, threads=THREADS, unroll=UNROLL, source=stored[0], target=stored[1], wide=wide,
                          length=length, loaded=loaded, value=value, name=NAME)


def row_major_code(width: int) -> str:
    """Return the CUDA source of the kernel that makes an array of elements of `width` bytes row-major."""
    part = min(width, 8)
    return _ROW_MAJOR_SOURCE.format(dimensions=DIMENSIONS, threads=THREADS, name=NAME, unit=_UNITS[part],
                                    parts=width // part)


def layout(source: DeviceArray, target: DeviceArray) -> tuple[Array, int]:
    """Return the parameter of the row-major kernel, and its grid.

    Raises:
        UnsupportedError: for more than 16 dimensions.
    """
    if source.ndim > DIMENSIONS:
        raise UnsupportedError(f"an array of {source.ndim} dimensions is not row-major; at most {DIMENSIONS} are rearranged")
    table = np.zeros(1, LAYOUT)
    entry = table[0]
    entry["source"], entry["target"], entry["count"], entry["dimensions"] = (
        source.pointer, target.pointer, source.size, source.ndim)
    entry["shape"][:source.ndim], entry["strides"][:source.ndim] = source.shape, source.strides
    return table, -(-source.size // THREADS)


def chunk(source: str, target: str) -> int:
    """Return the number of elements per block."""
    return THREADS * UNROLL * (16 // max(SUPPORTED_DTYPES[source].itemsize, SUPPORTED_DTYPES[target].itemsize))


def tables(copies: Sequence[CopySpec], elements: int, factor: float = 1.0, fill_value: int = 0) -> Iterator[Array]:
    """Yield the tables of the required launches; `table["first"][0][table["entries"][0]]` is the grid.

    Args:
        copies: the arrays; empty ones are skipped.
        elements: the number of elements per block; see `chunk`.
        fill_value: the bits with which an array without a source is filled.
    """
    arrays = [pair for pair in copies if pair[2]]
    for begin in range(0, len(arrays), ENTRIES):
        some = np.array(arrays[begin:begin + ENTRIES], np.uint64)
        table, count = np.zeros(1, TABLE), len(some)
        entry = table[0]
        entry["source"][:count], entry["target"][:count], entry["count"][:count] = some.T
        blocks = -(-entry["count"][:count] // elements)
        entry["first"][1:count + 1] = np.cumsum(blocks)
        entry["entries"], entry["factor"], entry["filler"] = count, factor, fill_value
        yield table


def bits(value: float, dtype: np.dtype[np.generic]) -> int:
    """Return the bits of a value of a dtype, for `fill_value`."""
    if dtype == BFLOAT16:
        return int(struct.unpack("<I", struct.pack("<f", value))[0]) >> 16
    return int.from_bytes(np.array(value).astype(dtype).tobytes(), "little")


_SOURCE = """
typedef {wide} wide;
struct Table {{
    unsigned long long source[{entries}], target[{entries}];
    long long count[{entries}];
    int first[{entries} + 1], entries;
    double factor;
    unsigned long long filler;
}};
struct alignas(sizeof({source}) * {length}) Sources {{ {source} v[{length}]; }};
struct alignas(sizeof({target}) * {length}) Targets {{ {target} v[{length}]; }};

__device__ inline float from_float16(unsigned short x) {{
#ifdef __CUDACC__
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    return host_from_float16(x);
#endif
}}
__device__ inline unsigned short to_float16(float x) {{
#ifdef __CUDACC__
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#else
    return host_to_float16(x);
#endif
}}
union Bits {{ float f; unsigned int u; }};
__device__ inline float from_bfloat16(unsigned short x) {{
    Bits bits;
    bits.u = (unsigned int)x << 16;
    return bits.f;
}}
__device__ inline unsigned short to_bfloat16(float x) {{
    Bits bits;
    bits.f = x;
    if (x != x) return 0x7fc0;
    return (unsigned short)((bits.u + (((bits.u >> 16) & 1u) + 0x7fffu)) >> 16);
}}
__device__ inline {target} convert(const Table& table, {source} x) {{
    wide y = {loaded};
    (void)y;
    return {value};
}}

extern "C" __global__ void __launch_bounds__({threads}) {name}(const __grid_constant__ Table table) {{
    const int block = (int)blockIdx.x, thread = (int)threadIdx.x;
    int low = 0, high = table.entries - 1;
    while (low < high) {{
        const int middle = (low + high + 1) / 2;
        if (table.first[middle] <= block) low = middle; else high = middle - 1;
    }}
    const long long chunk = (long long){threads} * {unroll} * {length};
    const long long begin = (long long)(block - table.first[low]) * chunk;
    const long long rest = table.count[low] - begin, count = rest < chunk ? rest : chunk;
    const {source}* from = ({source}*)table.source[low] + begin;
    {target}* to = ({target}*)table.target[low] + begin;
    if (table.source[low] == 0) {{
        union {{ unsigned long long bits; {target} value; }} filler;
        filler.bits = table.filler;
        for (long long i = thread; i < count; i += {threads}) to[i] = filler.value;
        return;
    }}
    const bool aligned = (unsigned long long)from % sizeof(Sources) == 0 && (unsigned long long)to % sizeof(Targets) == 0;
    if (!aligned) {{
        for (long long i = thread; i < count; i += {threads}) to[i] = convert(table, from[i]);
        return;
    }}
    Sources loaded[{unroll}];
#pragma unroll
    for (int u = 0; u < {unroll}; u++) {{
        const long long i = ((long long)u * {threads} + thread) * {length};
        if (i + {length} <= count) loaded[u] = *(const Sources*)(from + i);
    }}
#pragma unroll
    for (int u = 0; u < {unroll}; u++) {{
        const long long i = ((long long)u * {threads} + thread) * {length};
        if (i + {length} <= count) {{
            Targets stored;
#pragma unroll
            for (int j = 0; j < {length}; j++) stored.v[j] = convert(table, loaded[u].v[j]);
            *(Targets*)(to + i) = stored;
        }}
    }}
    const long long i = count - count % {length} + thread;
    if (i < count) to[i] = convert(table, from[i]);
}}
"""

_ROW_MAJOR_SOURCE = """
struct Layout {{
    unsigned long long source, target;
    long long count, dimensions, shape[{dimensions}], strides[{dimensions}];
}};
struct Element {{ {unit} parts[{parts}]; }};

extern "C" __global__ void __launch_bounds__({threads}) {name}(const __grid_constant__ Layout layout) {{
    const long long i = (long long)blockIdx.x * {threads} + threadIdx.x;
    if (i >= layout.count) return;
    long long rest = i, from = 0;
    for (int d = (int)layout.dimensions - 1; d >= 0; d--) {{
        from += rest % layout.shape[d] * layout.strides[d];
        rest /= layout.shape[d];
    }}
    ((Element*)layout.target)[i] = ((const Element*)layout.source)[from];
}}
"""
