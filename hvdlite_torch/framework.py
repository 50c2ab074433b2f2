"""PyTorch tensors as the runtime's arrays, without copying."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdlite.core.array import BFLOAT16, Array
from hvdlite.core.device import AnyArray, Completion, DeviceAccess, DeviceArray, Event
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import Collective
from hvdlite.training.framework import Loan, Shape
from hvdlite_torch import cuda
from hvdlite_torch.compression import Compressor


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


def lent(tensor: torch.Tensor, name: str, devices: DeviceAccess | None) -> AnyArray:
    """Return the memory of a tensor from `contiguous` as the runtime's array; one on a GPU needs `devices`."""
    if not cuda.is_on_gpu(tensor):
        return as_array(tensor, name)
    assert devices is not None
    return cuda.lend(tensor, devices)


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


def widen(source: Array, out: Array) -> None:
    """Convert a flat 16-bit float array to float32: five times as fast as NumPy for float16."""
    torch.from_numpy(out).copy_(_sixteen_bits(source if source.flags.writeable else source.copy()))  # torch warns otherwise


def narrow(source: Array, out: Array) -> None:
    """Convert a flat float32 array to 16-bit floats, rounding to nearest even."""
    _sixteen_bits(out).copy_(torch.from_numpy(source))


def _sixteen_bits(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16 if array.dtype == BFLOAT16 else torch.float16)


@dataclasses.dataclass(slots=True, eq=False)
class Seat:
    """A tensor over a place in a bucket.

    `home` never leaves the adapter; `view` is what parameters get as their gradient, so users can do anything to it. It has
    the same memory, unless a gradient on a GPU is compressed.
    """

    home: torch.Tensor
    view: torch.Tensor
    address: int
    mark: Any  # identifies `view`
    context: Any  # what the compressor needs to undo its work; None when nothing is compressed
    dtype: torch.dtype  # of the view
    on_gpu: bool = False
    home_dtype: torch.dtype = dataclasses.field(init=False)  # kept: asking a tensor costs, and is done for every gradient
    shape: torch.Size = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.home_dtype, self.shape = self.home.dtype, self.home.shape

    @classmethod
    def over(cls, place: Array, context: Any) -> Seat:
        """Return the seat over an array of any strides."""
        home = _tensor(place)
        view = home.detach()
        return cls(home, view, home.data_ptr(), weakref.ref(view), context, home.dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is the view, unchanged."""
        return tensor is self.view and tensor.data_ptr() == self.address and tensor.dtype is self.dtype

    def renew(self, parameter: torch.Tensor) -> None:
        """Make another view, on a GPU."""
        self.view = self.home.detach() if self.context is None else torch.empty_like(parameter.detach())
        self.address, self.mark = self.view.data_ptr(), weakref.ref(self.view)


class TorchGradients:
    """Gradients of torch parameters, for `training.GradientReducer`.

    Args:
        as_view: whether reduced gradients are views of their buckets, where the compression allows it.
        devices: the plane for tensors on GPUs; without it they go over host memory.
    """

    def __init__(self, compression: type[Compressor], sparse_as_dense: bool, as_view: bool = True,
                 devices: DeviceAccess | None = None) -> None:
        self._devices = devices
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._as_view = as_view

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is not None

    def shape(self, parameter: torch.Tensor) -> Shape:
        compressed, _ = self._compression.compress(parameter.detach().new_empty(0))
        return Shape(_dtype_name(compressed.dtype), tuple(parameter.shape), _dense_strides(parameter))

    def lend(self, parameter: torch.Tensor) -> Loan[torch.Tensor]:
        return self._loan(parameter, self._gradient(parameter).detach())

    def lend_empty(self, parameter: torch.Tensor) -> Loan[torch.Tensor]:
        return self._loan(parameter, torch.empty_like(parameter.detach()))

    def give_back(self, loan: Loan[torch.Tensor]) -> Any:
        result = self._compression.decompress(loan.tensor, loan.context)
        gradient = loan.parameter.grad
        if gradient is None:
            gradient = loan.parameter.grad = torch.empty_like(loan.parameter).copy_(result)
        elif gradient.data_ptr() != result.data_ptr():
            gradient.detach().copy_(result)
        return weakref.ref(gradient)

    def is_sparse(self, parameter: torch.Tensor) -> bool:
        gradient = parameter.grad
        return gradient is not None and gradient.layout is torch.sparse_coo and not self._sparse_as_dense

    def rows(self, parameter: torch.Tensor) -> Array:
        gradient = self._gradient(parameter).detach().coalesce()
        values, _ = self._compression.compress(gradient.values())
        count = gradient._nnz()
        indices = on_host(gradient.indices().t(), "indices").reshape(count, -1).view(np.uint8)
        flat = on_host(values.reshape(count, -1), "gradient").view(np.uint8).reshape(count, -1)
        return np.concatenate([indices, flat], axis=1)

    def give_rows(self, parameter: torch.Tensor, rows: Array, factor: float) -> Any:
        sample, context = self._compression.compress(parameter.detach().new_empty(0))
        sparse_dims = self._sparse_dims(parameter, rows.shape[1], sample)
        indices = torch.from_numpy(np.ascontiguousarray(rows[:, :8 * sparse_dims])).view(torch.int64)
        values = torch.from_numpy(np.ascontiguousarray(rows[:, 8 * sparse_dims:])).view(sample.dtype)
        values = self._compression.decompress(values, context).reshape(-1, *parameter.shape[sparse_dims:]) * factor
        gradient = torch.sparse_coo_tensor(indices.reshape(-1, sparse_dims).t(), values, parameter.shape,
                                           check_invariants=False).coalesce()
        gradient = parameter.grad = gradient.to(parameter.device)
        return weakref.ref(gradient)

    @staticmethod
    def _sparse_dims(parameter: torch.Tensor, row_bytes: int, sample: torch.Tensor) -> int:
        """Return how many of the first dimensions are sparse, given the bytes of a row."""
        for dims in range(1, parameter.dim() + 1):
            if 8 * dims + sample.element_size() * parameter.shape[dims:].numel() == row_bytes:
                return dims
        raise UnsupportedError(f"a sparse gradient with rows of {row_bytes} bytes does not fit a parameter of shape "
                               f"{list(parameter.shape)}")

    def seat(self, parameter: torch.Tensor, place: AnyArray) -> Seat:
        assert isinstance(place, np.ndarray)
        return Seat.over(place, self._compression.compress(parameter.detach().new_empty(0))[1])

    def fill(self, parameter: torch.Tensor, seat: Seat) -> bool:
        gradient = parameter.grad
        assert gradient is not None
        if not seat.holds(gradient):
            compressed = self._fitting(parameter, gradient, seat)
            if compressed is None:
                return False
            seat.home.copy_(compressed)
        parameter.grad = None
        return True

    def fill_all(self, pairs: Sequence[tuple[torch.Tensor, Seat]]) -> list[bool]:
        return fill_seats(pairs, self._fitting, torch._foreach_copy_)

    def fill_with(self, seat: Seat, value: Any) -> None:
        seat.home.fill_(value)

    def filled(self, memory: AnyArray) -> Event | None:
        return None

    def follow(self, completion: Completion) -> None:
        completion.follow(cuda.current_stream(completion.device))

    def settle(self, seat: Seat, values: AnyArray) -> None:
        assert isinstance(values, np.ndarray)
        seat.home.copy_(_tensor(values))

    def vacate(self, parameter: torch.Tensor, seat: Seat) -> None:
        if parameter.grad is not None and seat.holds(parameter.grad):
            parameter.grad = parameter.grad.clone()

    def adopt(self, parameter: torch.Tensor, seat: Seat) -> Any:
        if seat.context is None and self._as_view and not cuda.is_on_gpu(parameter):
            if not seat.holds(seat.view):  # somebody gave our view other memory
                seat.view = seat.home.detach()
                seat.mark = weakref.ref(seat.view)
            parameter.grad = seat.view
            return seat.mark
        own = seat.home.clone() if seat.context is None else self._compression.decompress(seat.home, seat.context)
        own = parameter.grad = own.to(parameter.device)
        return weakref.ref(own)

    def adopt_all(self, pairs: Sequence[tuple[torch.Tensor, Seat]]) -> list[Any]:
        return [self.adopt(parameter, seat) for parameter, seat in pairs]

    def is_marked(self, parameter: torch.Tensor, mark: Any) -> bool:
        return mark() is parameter.grad

    def _fitting(self, parameter: torch.Tensor, gradient: torch.Tensor, seat: Seat) -> torch.Tensor | None:
        """Return what is to be copied into the seat; None when it does not fit. Called for every gradient of every step."""
        if gradient.layout is not torch.strided:
            if self.is_sparse(parameter):
                return None
            gradient = contiguous(self._gradient(parameter), "gradient")
        if gradient.requires_grad:
            gradient = gradient.detach()
        if self._compression is not Compressor:
            gradient, seat.context = self._compression.compress(gradient)
        return gradient if gradient.dtype is seat.home_dtype and gradient.shape == seat.shape else None

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter's gradient, densified for good when that is wanted."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided and self._sparse_as_dense:
            gradient = parameter.grad = gradient.to_dense()
        return gradient

    def _loan(self, parameter: torch.Tensor, values: torch.Tensor) -> Loan[torch.Tensor]:
        compressed, context = self._compression.compress(values)
        dense = cuda.carried(contiguous(compressed, "gradient"), self._devices, Collective.ALLREDUCE)
        return Loan(parameter, lent(dense, "gradient", self._devices), dense, context)


def fill_seats(pairs: Sequence[tuple[torch.Tensor, Seat]],
               fitting: Callable[[torch.Tensor, torch.Tensor, Seat], torch.Tensor | None],
               copy: Callable[[list[torch.Tensor], list[torch.Tensor]], object]) -> list[bool]:
    """Put gradients into their seats; see `training.Framework.fill_all`.

    Args:
        fitting: returns what is to be copied for a parameter's gradient; None when it does not fit its seat.
        copy: copies all that is to be copied into the seats.
    """
    homes, values, fits = [], [], []
    for parameter, seat in pairs:
        gradient = parameter.grad
        if gradient is not None and (seat.context is not None or not seat.holds(gradient)):
            gradient = fitting(parameter, gradient, seat)
            if gradient is not None:
                homes.append(seat.home)
                values.append(gradient)
        fits.append(gradient is not None)
    if homes:
        copy(homes, values)
    for (parameter, _), fit in zip(pairs, fits, strict=True):
        if fit:
            parameter.grad = None
    return fits


def as_tensor(array: AnyArray) -> torch.Tensor:
    """Return a tensor over an array that a collective returned: for one on a GPU, the tensor that it is."""
    if isinstance(array, DeviceArray):
        assert isinstance(array.owner, torch.Tensor)
        return array.owner
    return _tensor(array)


def _tensor(array: Array) -> torch.Tensor:
    """Return a tensor over a NumPy array of any strides."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor that fills its memory in another order than row-major, else ()."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return ()
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return ()
        expected *= length
    return tuple(tensor.stride())
