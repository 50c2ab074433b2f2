"""PyTorch tensors as the runtime's arrays, without copying; and kernels of torch for the runtime's 16-bit floats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvdlite import api
from hvdlite.core.array import BFLOAT16, Array
from hvdlite.core.device import AnyArray, DeviceAccess, DeviceArray
from hvdlite.core.errors import UnsupportedError
from hvdlite_torch.arrays import cuda

_HIGHEST_MEAN = {torch.bfloat16: 0x7EFF, torch.float16: 0x7BFF}
"""Bits of the largest mean whose sum surely was finite in float32: below 2 ** 127; any finite one for float16."""
_HIGHEST_SUM = {torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF}
"""Bits of the largest finite value."""
_SIGN = 0x8000


def contiguous(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a contiguous tensor with `tensor`'s values, sharing its memory when it is contiguous itself.

    Raises:
        UnsupportedError: for something else, a tensor on an accelerator that is not an NVIDIA GPU, or a sparse one.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"'{name}' must be a torch.Tensor, not {type(tensor).__name__} (for arrays there is "
                               "`import hvdlite as hvd`)")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"'{name}' is on {tensor.device}, and only NVIDIA's GPUs (cuda) have a data plane; move "
                               "it to the CPU")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"'{name}' is sparse ({tensor.layout}); densify it with .to_dense(), or pass "
                               "sparse_as_dense=True to DistributedOptimizer")
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def as_runtime_array(tensor: torch.Tensor, name: str, devices: DeviceAccess | None) -> AnyArray:
    """Return the memory of a tensor from `contiguous` as the runtime's array; one on a GPU needs `devices`."""
    return cuda.wrap(tensor, devices) if cuda.is_on_gpu(tensor) else as_array(tensor, name)


def on_host(tensor: torch.Tensor, name: str) -> Array:
    """Return a tensor's values as a NumPy array, which is a copy of one on a GPU."""
    dense = contiguous(tensor, name)
    return as_array(dense.cpu() if cuda.is_on_gpu(dense) else dense, name)


def as_array(tensor: torch.Tensor, name: str) -> Array:
    """Return a NumPy view of the memory of a tensor from `contiguous`.

    Raises:
        UnsupportedError: for a dtype that NumPy does not have.
    """
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    try:
        return tensor.numpy()
    except TypeError:
        raise UnsupportedError(f"'{name}': dtype {tensor.dtype} is not supported") from None


def as_tensor(array: AnyArray) -> torch.Tensor:
    """Return a tensor over an array that a collective returned: for one on a GPU, the tensor that it is."""
    if isinstance(array, DeviceArray):
        assert isinstance(array.owner, torch.Tensor)
        return array.owner
    return host_tensor(array)


def host_tensor(array: Array) -> torch.Tensor:
    """Return a tensor over a NumPy array of any strides."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor that fills its memory in another order than row-major, else ()."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return ()
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return ()
        expected *= length
    return tuple(tensor.stride())


def few_values(tensors: Sequence[torch.Tensor], count: int) -> Array:
    """Return values that are spread over each tensor, in float32, of shape (tensors, count); zeros where it has fewer."""
    rows: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        values = flat[::max(1, flat.numel() // count)][:count].float()
        row = torch.nn.functional.pad(values, (0, count - values.numel()))
        rows.append(row.to(rows[0].device) if rows else row)
    return torch.stack(rows).cpu().numpy()  # type: ignore[no-any-return]


# --- kernels for 16-bit floats that torch has and NumPy does not; see `hvdlite.planes.arithmetic.Casts` ------------------


def widen(source: Array, out: Array) -> None:
    """Convert a flat 16-bit float array to float32: five times as fast as NumPy for float16."""
    torch.from_numpy(out).copy_(_sixteen_bits(source))


def narrow(source: Array, out: Array) -> None:
    """Convert a flat float32 array to 16-bit floats, rounding to nearest even."""
    _sixteen_bits(out).copy_(torch.from_numpy(source))


def reduce_pair(one: Array, other: Array, divisor: int, out: Array) -> bool:
    """Write the sum of two 16-bit arrays, divided by 1 or 2, to `out`; return False where that may not be exact.

    Both of torch's kernels compute in float32 and round once. Their bits equal those of the sum and its half in float32 as
    long as the float32 operations do not overflow (all 2 ** 32 pairs of values were compared). The interpolation
    y - (y - x) / 2 overflows for other values than x + y does, so large and infinite results, and NaN, are refused.
    """
    first, second, result = _sixteen_bits(one), _sixteen_bits(other), _sixteen_bits(out)
    if divisor == 1:
        torch.add(first, second, out=result)
        highest = _HIGHEST_SUM[result.dtype]
    else:
        torch.lerp(first, second, 0.5, out=result)
        highest = _HIGHEST_MEAN[result.dtype]
    # NumPy finds the maximum of integers many times as fast as any library finds an infinite value.
    return bool(out.view(np.int16).max() <= highest and out.view(np.uint16).max() <= highest | _SIGN)


def _sixteen_bits(array: Array) -> torch.Tensor:
    bits = array.view(np.int16)
    return torch.from_numpy(bits if bits.flags.writeable else bits.copy()).view(  # torch warns of read-only memory
        torch.bfloat16 if array.dtype == BFLOAT16 else torch.float16)


api.offer_casts(widen, narrow, reduce_pair)  # NumPy's own are slower


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients: torch's `grad_dtype` where that is set, which is new in torch 2.10."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def empty_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor like a parameter's gradients, with any values."""
    return torch.empty_like(parameter.detach(), dtype=gradient_dtype(parameter))
