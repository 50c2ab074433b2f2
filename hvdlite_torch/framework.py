"""PyTorch tensors as the runtime's arrays, without copying."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hvdlite import api
from hvdlite.core.array import BFLOAT16, Array
from hvdlite.core.device import AnyArray, Completion, DeviceAccess, DeviceArray, Event
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import Collective
from hvdlite.training.framework import Shape, StagedGradient
from hvdlite_torch import casts, cuda
from hvdlite_torch.bucket_views import COUNTS, BucketView, BucketViewBatch, Mark, fill_views, given_to
from hvdlite_torch.compression import Compressor, wire_dtype
from hvdlite_torch.unfinal import get_grad, set_grad

api.offer_casts(casts.widen, casts.narrow, casts.reduce_pair)  # NumPy's own are slower
Elsewhere = dict[int, weakref.ref[Any]]


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
    if not cuda.is_on_gpu(tensor):
        return as_array(tensor, name)
    assert devices is not None
    return cuda.wrap(tensor, devices)


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


FEW = 64
"""Elements; so many of a gradient tell most of the time that it is not all zeros."""
MANY_KEPT = 4
"""Number of parameters with gradients kept over a round, from which all gradients are copied out of their buckets."""


class TorchGradients:
    """Gradients of torch parameters, for `training.GradientReducer`.

    Args:
        as_view: whether reduced gradients are views of their buckets, where the compression allows it.
        devices: the plane for tensors on GPUs; without it they go over host memory.

    Attributes:
        elsewhere: parameters, by identity, whose gradients another optimizer reduces, as long as what is referred to lives:
            here they have none.
        unseen_sparse_dims: how many dimensions of a densified gradient are to be sparse afterwards, where this rank has had
            none of its own.
    """

    unseen_sparse_dims = 0
    needs_notes = False

    def __init__(self, compression: type[Compressor], sparse_as_dense: bool, as_view: bool = True,
                 devices: DeviceAccess | None = None) -> None:
        self.elsewhere: Elsewhere = {}
        self._devices = devices
        self._compression = compression
        self._casts = wire_dtype(compression, torch.float32) is not None  # it does nothing that a copy does not do
        self._sparse_as_dense = sparse_as_dense
        self._as_view = as_view and COUNTS
        self._copied: set[int] = set()  # parameters, by identity, whose gradients are copied out of their buckets
        self._sparse_dims_of: dict[int, int] = {}  # by parameter: of sparse gradients that were densified

    def note(self, parameter: torch.Tensor) -> None:
        return None

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        if self.elsewhere and is_elsewhere(parameter, self.elsewhere):
            return False
        return get_grad(parameter) is not None

    def is_trainable(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad and not is_lazy(parameter)  # a lazy one has no shape before its first forward pass

    def shape(self, parameter: torch.Tensor) -> Shape:
        return Shape(cuda.dtype_name(self._wire(parameter)[0]), tuple(parameter.shape), dense_strides(parameter))

    def stage(self, parameter: torch.Tensor) -> StagedGradient[torch.Tensor]:
        return self._stage(parameter, self._gradient(parameter).detach())

    def stage_empty(self, parameter: torch.Tensor) -> StagedGradient[torch.Tensor]:
        return self._stage(parameter, torch.empty_like(parameter.detach()))

    def unstage(self, staged: StagedGradient[torch.Tensor]) -> Any:
        result = self._compression.decompress(staged.tensor, staged.context)
        parameter, gradient = staged.parameter, get_grad(staged.parameter)
        if sparse_dims := self._restored_dims(parameter):
            return given_to(parameter, result.to_sparse(sparse_dims))
        if gradient is None or gradient.dtype is not parameter.dtype:
            return given_to(parameter, torch.empty_like(parameter.detach()).copy_(result))
        if gradient.data_ptr() != result.data_ptr():
            gradient.detach().copy_(result)
        return Mark(gradient)

    def is_sparse(self, parameter: torch.Tensor) -> bool:
        gradient = get_grad(parameter)
        return gradient is not None and gradient.layout is torch.sparse_coo and not self._sparse_as_dense

    def rows(self, parameter: torch.Tensor) -> Array:
        gradient = self._gradient(parameter).detach().coalesce()
        values, _ = self._compression.compress(gradient.values())
        indices = on_host(gradient.indices().t(), "indices").view(np.uint8)
        flat = on_host(values.reshape(len(values), math.prod(values.shape[1:])), "gradient").view(np.uint8)
        return np.concatenate([indices, flat], axis=1)

    def give_rows(self, parameter: torch.Tensor, rows: Array, factor: float) -> Any:
        dtype, context = self._wire(parameter)
        sparse_dims = self._sparse_dims(parameter, rows.shape[1], dtype)
        # Flat, because the slice of a single row counts as contiguous whatever its strides, which the views refuse.
        indices = torch.from_numpy(rows[:, :8 * sparse_dims].reshape(-1)).view(torch.int64).clone()  # torch may resize it
        values = torch.from_numpy(rows[:, 8 * sparse_dims:].reshape(-1)).view(dtype)
        values = self._compression.decompress(values, context).reshape(-1, *parameter.shape[sparse_dims:]) * factor
        gradient = torch.sparse_coo_tensor(indices.reshape(-1, sparse_dims).t(), values, parameter.shape,
                                           check_invariants=False).coalesce()
        return given_to(parameter, gradient.to(parameter.device))

    @staticmethod
    def _sparse_dims(parameter: torch.Tensor, row_bytes: int, dtype: torch.dtype) -> int:
        """Return how many of the first dimensions are sparse, given the bytes of a row."""
        for dims in range(1, parameter.dim() + 1):
            if 8 * dims + dtype.itemsize * parameter.shape[dims:].numel() == row_bytes:
                return dims
        raise UnsupportedError(f"a sparse gradient with rows of {row_bytes} bytes does not fit a parameter of shape "
                               f"{list(parameter.shape)}")

    def bucket_view(self, parameter: torch.Tensor, place: AnyArray) -> BucketView:
        assert isinstance(place, np.ndarray)
        return BucketView(_tensor(place), self._wire(parameter)[1])

    def fill(self, parameter: torch.Tensor, view: BucketView) -> bool:
        gradient = get_grad(parameter)
        assert gradient is not None
        if not view.holds(gradient):
            compressed = self._fitting(parameter, gradient, view)
            if compressed is None:
                return False
            view.home.copy_(compressed)
        set_grad(parameter, None)
        return True

    def batch(self, pairs: Sequence[tuple[torch.Tensor, BucketView]]) -> Sequence[tuple[torch.Tensor, BucketView]]:
        is_plain = (self._casts and not self._sparse_as_dense and self._as_view and len(pairs) > 1
                    and len({view.context is None for _, view in pairs}) == 1
                    and not any(cuda.is_on_gpu(parameter) for parameter, _ in pairs))
        return BucketViewBatch(pairs) if is_plain else pairs

    def fill_all(self, pairs: Sequence[tuple[torch.Tensor, BucketView]]) -> bool:
        if isinstance(pairs, BucketViewBatch) and pairs.fill():
            return True
        return fill_views(pairs, self._fitting, torch._foreach_copy_)

    def fill_with(self, parameter: torch.Tensor, view: BucketView, value: Any) -> bool:
        if not (self._is_free(parameter, view) and self._suits(parameter, view)):
            return False
        with torch.no_grad():
            view.home.fill_(value)
        return True

    def filled(self, memory: AnyArray) -> Event | None:
        return None

    def follow(self, completion: Completion) -> None:
        completion.block_stream(cuda.current_stream(completion.device))

    def copy_from_row_major(self, view: BucketView, values: AnyArray) -> None:
        assert isinstance(values, np.ndarray)
        view.home.copy_(_tensor(values))

    def detach_view(self, parameter: torch.Tensor, view: BucketView) -> Any:
        gradient = get_grad(parameter)
        return given_to(parameter, gradient.clone()) if gradient is not None and view.holds(gradient) else None

    def install_view(self, parameter: torch.Tensor, view: BucketView) -> Any:
        if sparse_dims := self._restored_dims(parameter):
            return given_to(parameter, self._compression.decompress(view.home, view.context).to_sparse(sparse_dims))
        if view.context is None and self._shows_views(parameter) and not cuda.is_on_gpu(parameter):
            return view.give_to(parameter)
        if view.context is not None and self._casts and self._as_view and not cuda.is_on_gpu(parameter):
            copy = view.private_copy(parameter)
            copy.home.copy_(view.home)
            return copy.give_to(parameter)
        own = view.home.clone() if view.context is None else self._compression.decompress(view.home, view.context)
        return given_to(parameter, own.to(parameter.device))

    def install_views(self, pairs: Sequence[tuple[torch.Tensor, BucketView]]) -> Sequence[Any]:
        if isinstance(pairs, BucketViewBatch) and self._as_view and not self._copied:
            marks = pairs.install()
            if marks is not None:
                return marks
        return [self.install_view(parameter, view) for parameter, view in pairs]

    def is_marked(self, parameter: torch.Tensor, mark: Mark | None) -> bool:
        return mark is not None and mark.tensor() is get_grad(parameter)

    def is_changed(self, parameter: torch.Tensor, mark: Mark) -> bool:
        gradient = get_grad(parameter)
        return gradient is not mark.tensor() or (gradient is not None and gradient._version != mark.version)

    def is_zeroed(self, parameter: torch.Tensor, mark: Mark) -> bool:
        gradient = get_grad(parameter)
        if gradient is None or gradient is not mark.tensor() or gradient._version == mark.version or gradient.is_cuda:
            return False
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        return not (values.flatten()[:FEW].any() or values.any())

    def renew(self, parameter: torch.Tensor, mark: Mark) -> None:
        if (gradient := mark.tensor()) is not None:
            mark.version = gradient._version

    def take(self, parameter: torch.Tensor) -> Any:
        gradient = get_grad(parameter)
        set_grad(parameter, None)
        return gradient

    def is_staged(self, staged: StagedGradient[torch.Tensor]) -> bool:
        gradient = get_grad(staged.parameter)
        if gradient is None or gradient.layout is not torch.strided or not gradient.numel():
            return False
        return gradient.data_ptr() == staged.tensor.data_ptr()

    @torch.no_grad()
    def accumulate(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        own = get_grad(parameter)
        if own is None:
            set_grad(parameter, gradient)
        elif own.layout is not torch.strided or gradient.layout is not torch.strided:
            set_grad(parameter, own + gradient)
        else:
            own.add_(gradient)

    def _shows_views(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter's gradient is a view of its bucket."""
        return self._as_view and id(parameter) not in self._copied

    def _is_free(self, parameter: torch.Tensor, view: BucketView) -> bool:
        """Return whether a view can be written to. When somebody has kept an earlier gradient, later ones are copies."""
        if not view.is_in_use:
            return True
        self._copied.add(id(parameter))
        if len(self._copied) >= MANY_KEPT:
            self._as_view = False
        return False

    def _suits(self, parameter: torch.Tensor, view: BucketView) -> bool:
        """Return whether a view is right for the parameter as it is now, which has no gradient."""
        dtype = parameter.dtype
        if not self._casts:
            dtype, view.context = self._wire(parameter)
        return dtype is self._fitting_dtype(view) and parameter.shape == view.shape

    def _fitting_dtype(self, view: BucketView) -> torch.dtype:
        """Return the dtype of what can be copied into a view; where a copy does not cast, of what has been compressed."""
        return view.context if self._casts and view.context is not None else view.dtype

    def _wire(self, parameter: torch.Tensor) -> tuple[torch.dtype, Any]:
        """Return the dtype in which the parameter's gradients travel, and what the compressor needs to undo its work."""
        dtype = wire_dtype(self._compression, parameter.dtype)
        if dtype is None:
            sample, context = self._compression.compress(parameter.detach().new_empty(0))
            return sample.dtype, context
        return dtype, None if dtype is parameter.dtype else parameter.dtype

    def _restored_dims(self, parameter: torch.Tensor) -> int:
        """Return how many dimensions of the reduced gradient are to be sparse, as in the gradient that came in."""
        return self._sparse_dims_of.get(id(parameter), self.unseen_sparse_dims) if self._sparse_as_dense else 0

    def _fitting(self, parameter: torch.Tensor, gradient: torch.Tensor, view: BucketView) -> torch.Tensor | None:
        """Return what is to be copied, and cast, into the view; None when it does not fit."""
        if not self._is_free(parameter, view):
            return None
        if gradient.layout is not torch.strided:
            if self.is_sparse(parameter):
                return None
            gradient = contiguous(self._gradient(parameter), "gradient")
        if gradient.requires_grad:
            gradient = gradient.detach()
        if not self._casts:
            gradient, view.context = self._compression.compress(gradient)
        return gradient if gradient.dtype is self._fitting_dtype(view) and gradient.shape == view.shape else None

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter's gradient, densified for the reduction when that is wanted."""
        gradient = get_grad(parameter)
        assert gradient is not None
        if gradient.layout is not torch.strided and self._sparse_as_dense:
            if gradient.layout is torch.sparse_coo:
                self._sparse_dims_of[id(parameter)] = gradient.sparse_dim()
            gradient = gradient.to_dense()
            set_grad(parameter, gradient)
        return gradient

    def _stage(self, parameter: torch.Tensor, values: torch.Tensor) -> StagedGradient[torch.Tensor]:
        compressed, context = self._compression.compress(values)
        dense = cuda.to_transportable(contiguous(compressed, "gradient"), self._devices, Collective.ALLREDUCE)
        return StagedGradient(parameter, as_runtime_array(dense, "gradient", self._devices), dense, context)


def is_elsewhere(parameter: torch.Tensor, elsewhere: Elsewhere) -> bool:
    """Return whether another optimizer reduces the parameter's gradients."""
    reference = elsewhere.get(id(parameter))
    return reference is not None and reference() is not None


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
