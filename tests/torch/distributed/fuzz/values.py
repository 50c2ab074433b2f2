"""Random tensors in random layouts, and what reductions of them are in plain NumPy."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.fuzzing import WrongError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
MOVED = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes without reductions."""
REDUCED = (*FLOATS, *FLOATS, *COMPLEX, *INTEGERS, torch.bool)
ANY = (*REDUCED, *MOVED)
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum, "BAND": np.bitwise_and,
    "BOR": np.bitwise_or, "BXOR": np.bitwise_xor, "AVG": np.add, "PREMUL_SUM": np.add}
OF_BOOL = {"SUM": np.logical_or, "PRODUCT": np.logical_and, "MIN": np.logical_and, "MAX": np.logical_or}


def values(key: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor that depends on the key alone."""
    generator = np.random.default_rng(key)
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    if dtype is torch.bool:
        flat = torch.from_numpy(generator.integers(0, 2, count, np.uint8)).bool()
    elif dtype in INTEGERS or dtype in MOVED:
        flat = torch.from_numpy(generator.integers(0, 256, count * dtype.itemsize, np.uint8)).view(dtype)
    elif dtype in COMPLEX:
        flat = torch.from_numpy(generator.standard_normal(count) + 1j * generator.standard_normal(count)).to(dtype)
    else:
        flat = torch.from_numpy(generator.standard_normal(count)).to(dtype)
    return flat.view(tuple(shape))


def ops_of(dtype: torch.dtype) -> list[str]:
    """Return the names of the operations that a dtype has."""
    if dtype is torch.bool:
        return [*OF_BOOL, "BAND", "BOR", "BXOR"]
    if dtype in COMPLEX:
        return ["SUM", "AVG"]
    if dtype in INTEGERS:
        return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    return ["SUM", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a tensor is to be: `tensor`, of any dtype, and by how much each element may differ."""

    tensor: torch.Tensor
    bound: torch.Tensor | None = None


def reduced(op: str, inputs: Sequence[torch.Tensor], factors: Sequence[float] = ()) -> Wanted:
    """Return what the reduction of the ranks' tensors is.

    Args:
        factors: those of PREMUL_SUM, by rank.
    """
    dtype = inputs[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        reduce = OF_BOOL.get(op, OPS[op]) if dtype is torch.bool else OPS[op]
        whole = inputs[0].numpy()
        for each in inputs[1:]:
            whole = reduce(whole, each.numpy())
        return Wanted(torch.from_numpy(np.asarray(whole)).reshape(inputs[0].shape))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    arrays = [each.to(wide).numpy() for each in inputs]
    if op == "PREMUL_SUM":
        arrays = [array * factor for array, factor in zip(arrays, factors, strict=True)]
    whole = arrays[0]
    for array in arrays[1:]:
        whole = OPS[op](whole, array)
    if op == "AVG":
        whole = whole / len(arrays)
    result = torch.from_numpy(np.asarray(whole)).reshape(inputs[0].shape)
    if op in ("MIN", "MAX"):
        return Wanted(result.to(dtype))
    epsilon = torch.finfo(dtype).eps * (len(arrays) + 2)
    size = np.abs(whole) if op == "PRODUCT" else sum((np.abs(array) for array in arrays), start=np.zeros(()))
    return Wanted(result, torch.from_numpy(np.asarray(size * epsilon + 1e-6)).reshape(result.shape))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Return a text that stands for the values of tensors."""
    return hashlib.blake2b(b"".join(map(bytes_of, tensors)), digest_size=8).hexdigest()


def compare(what: str, found: torch.Tensor, wanted: Wanted) -> None:
    """Raise `WrongError` if a tensor is not what it is to be."""
    target = wanted.tensor
    if tuple(found.shape) != tuple(target.shape):
        raise WrongError(f"{what}: the shape is {tuple(found.shape)}, not {tuple(target.shape)}")
    if wanted.bound is None:
        equal = found.dtype is target.dtype and bytes_of(found) == bytes_of(target)
    else:
        difference = (found.detach().to(target.dtype) - target).abs()
        equal = bool((difference <= wanted.bound).all())
    if not equal:
        raise WrongError(f"{what}: found {_short(found)}, wanted {_short(target)}")


def _short(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} {tensor.detach().reshape(-1)[:8].tolist()}"


# --- layouts ----------------------------------------------------------------------------------------------------------


class Laid:
    """A tensor in a random layout; `check_gaps` finds writes to memory that is not its own.

    Args:
        draws: what draws the layout.
        like: its values and dtype.
        is_contiguous: draw no other layout.
    """

    def __init__(self, draws: random.Random, like: torch.Tensor, *, is_contiguous: bool = False) -> None:
        kinds = ["plain", "plain", "offset"]
        if not is_contiguous and like.dim():
            kinds += ["strided", "reversed", "columns"]
        self.kind, shape = draws.choice(kinds), tuple(like.shape)
        self._view: Callable[[torch.Tensor], torch.Tensor] = lambda buffer: buffer
        room = shape
        if self.kind == "offset":
            begin, count = draws.randint(1, 3), like.numel()
            room = (count + begin + 2,)
            self._view = lambda buffer: buffer[begin:begin + count].view(shape)
        elif self.kind == "strided":
            room = (*shape[:-1], 2 * shape[-1])
            self._view = lambda buffer: buffer[..., ::2]
        elif self.kind == "reversed":
            room = shape[::-1]
            self._view = lambda buffer: buffer.permute(*range(len(shape))[::-1])
        elif self.kind == "columns":
            room = (*shape, 3)
            self._view = lambda buffer: buffer[..., 1]
        self._buffer = values([7, *shape], room, like.dtype)
        self._before = self._buffer.clone()
        self.tensor = self._view(self._buffer)
        self.tensor.copy_(like)

    def check_gaps(self, what: str) -> None:
        """Raise `WrongError` if memory beside the tensor has changed."""
        now = self._buffer.clone()
        self._view(now).copy_(self._view(self._before))
        if bytes_of(now) != bytes_of(self._before):
            raise WrongError(f"{what}: memory beside a tensor ({self.kind}) was written")
