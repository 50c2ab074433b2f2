"""Gradients of torch parameters, on the host and on GPUs, for `training.gradients.Reducer`."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hvdlite.core.array import Array
from hvdlite.core.device import Completion, DeviceAccess, DeviceArray
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import Collective
from hvdlite.handoff.buckets import LearnedBucket
from hvdlite.training.gradients.framework import Alone, Shape
from hvdlite_torch.arrays import cuda
from hvdlite_torch.arrays.tensors import as_runtime_array, contiguous, dense_strides, empty_gradient, gradient_dtype, on_host
from hvdlite_torch.compression import Compressor, wire_dtype
from hvdlite_torch.gradients.gpu_places import GpuPlaces
from hvdlite_torch.gradients.places import COUNTS, TorchPlaces
from hvdlite_torch.gradients.unfinal import get_grad, set_grad

FEW = 64
"""Elements; so many of a gradient are mostly enough to see that it is not all zeros."""
MANY_KEPT = 4
"""Number of parameters with gradients kept over a round, from which no gradient is a view of its bucket."""


class TorchGradients:
    """See `training.gradients.framework.Framework`.

    Args:
        as_view: whether reduced gradients may be views of their buckets.
        devices: the plane for tensors on GPUs; without it they go over host memory.
        unseen_sparse_dims: how many dimensions of a densified gradient are to be sparse afterwards, where this rank has had
            none of its own.
    """

    def __init__(self, compression: type[Compressor], sparse_as_dense: bool, as_view: bool = True,
                 devices: DeviceAccess | None = None, unseen_sparse_dims: int = 0) -> None:
        self.compression = compression
        self.casts = wire_dtype(compression, torch.float32) is not None  # it does nothing that a copy does not do
        self.sparse_as_dense = sparse_as_dense
        self.plane: DeviceAccess | None = None  # for tensors on GPUs, once a parameter has been on one
        self.streams: set[int] = set()  # streams that computed gradients since the last wait for buckets
        self._as_view = as_view and COUNTS
        self._devices = devices
        self._unseen_sparse_dims = unseen_sparse_dims
        self._kept: set[int] = set()  # parameters, by identity, of which a script has kept a view of a bucket
        self._sparse_dims_of: dict[int, int] = {}  # by parameter: of sparse gradients that were densified

    get = staticmethod(get_grad)
    set = staticmethod(set_grad)
    version = operator.attrgetter("_version")  # torch counts how often a tensor is written to
    reference = weakref.ref

    def is_trainable(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad and not is_lazy(parameter)  # a lazy one has no shape before its first forward pass

    def shape(self, parameter: torch.Tensor) -> Shape:
        return Shape(cuda.dtype_name(self.wire(parameter)[0]), tuple(parameter.shape), dense_strides(parameter))

    @torch.no_grad()
    def add(self, gradient: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        if gradient.layout is not torch.strided or more.layout is not torch.strided:
            return gradient + more
        return gradient.add_(more)

    @torch.no_grad()
    def scaled(self, gradients: Sequence[torch.Tensor], factor: float) -> Sequence[torch.Tensor]:
        torch._foreach_mul_([each if each.layout is torch.strided else each._values() for each in gradients], factor)
        return gradients

    def is_zero(self, gradient: torch.Tensor) -> bool:
        if gradient.is_cuda:
            return False
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        return not (values.flatten()[:FEW].any() or values.any())

    def rows(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Array | None:
        if gradient.layout is not torch.sparse_coo or self.sparse_as_dense:
            return None
        gradient = gradient.detach().coalesce()
        values, _ = self.compression.compress(gradient.values())
        indices = on_host(gradient.indices().t(), "indices").view(np.uint8)
        flat = on_host(values.reshape(len(values), math.prod(values.shape[1:])), "gradient").view(np.uint8)
        return np.concatenate([indices, flat], axis=1)

    def from_rows(self, parameter: torch.Tensor, rows: Array, factor: float) -> torch.Tensor:
        dtype, context = self.wire(parameter)
        sparse_dims = _sparse_dims(parameter, rows.shape[1], dtype)
        # Flat, because the slice of a single row counts as contiguous whatever its strides, which the views refuse.
        indices = torch.from_numpy(rows[:, :8 * sparse_dims].reshape(-1)).view(torch.int64).clone()  # torch may resize it
        values = torch.from_numpy(rows[:, 8 * sparse_dims:].reshape(-1)).view(dtype)
        values = self.compression.decompress(values, context).reshape(-1, *parameter.shape[sparse_dims:]) * factor
        gradient = torch.sparse_coo_tensor(indices.reshape(-1, sparse_dims).t(), values, parameter.shape,
                                           check_invariants=False).coalesce()
        return gradient.to(parameter.device)

    def places(self, bucket: LearnedBucket, parameters: Sequence[torch.Tensor]) -> TorchPlaces:
        return (GpuPlaces if isinstance(bucket.memory, DeviceArray) else TorchPlaces)(self, bucket, parameters)

    def alone(self, parameter: torch.Tensor, gradient: torch.Tensor | None, counts: bool) -> Alone:
        if gradient is not None and counts:
            densified = self.densified(parameter, gradient)
            gradient = gradient if densified is None else densified
            values = gradient.detach()
        else:
            values = empty_gradient(parameter)
        compressed, context = self.compression.compress(values)
        dense = cuda.to_transportable(contiguous(compressed, "gradient"), self._devices, Collective.ALLREDUCE)

        def result() -> torch.Tensor:
            reduced = self.compression.decompress(dense, context)
            if sparse_dims := self.restored_dims(parameter):
                return reduced.to_sparse(sparse_dims)
            if gradient is None or gradient.dtype is not gradient_dtype(parameter) or gradient.layout is not torch.strided:
                return empty_gradient(parameter).copy_(reduced)
            if gradient.data_ptr() != reduced.data_ptr():
                gradient.detach().copy_(reduced)
            return gradient
        return as_runtime_array(dense, "gradient", self._devices), result

    def follow(self, completion: Completion) -> None:
        completion.block_stream(cuda.current_stream(completion.device))
        self.streams.clear()

    # --- for torch only --------------------------------------------------------------------------------------------------

    def use_plane(self) -> bool:
        """A parameter is on a GPU: let gradients be reduced there, if there is a plane; return whether there is one."""
        if self.plane is None and self._devices is not None and not self._devices.unavailable_reason():
            self.plane = self._devices
        return self.plane is not None

    def has_plane_for(self, dtype: torch.dtype) -> bool:
        """Return whether gradients on GPUs that travel in this dtype are reduced there."""
        return self.plane is not None and self.plane.supports(Collective.ALLREDUCE, None, cuda.dtype_name(dtype))

    def note(self, parameter: torch.Tensor) -> None:
        """A gradient on a GPU was computed on this thread's current stream."""
        self.streams.add(cuda.current_stream(cuda.cuda_index(parameter)))

    def wire(self, parameter: torch.Tensor) -> tuple[torch.dtype, Any]:
        """Return the dtype in which the parameter's gradients travel, and what the compressor needs to undo its work."""
        own = gradient_dtype(parameter)
        dtype = wire_dtype(self.compression, own)
        if dtype is None:
            sample, context = self.compression.compress(parameter.detach().new_empty(0, dtype=own))
            return sample.dtype, context
        return dtype, None if dtype is own else own

    def shows_view(self, parameter: torch.Tensor, context: Any) -> bool:
        """Return whether a gradient that nobody else uses comes back as a view of its bucket."""
        return self._as_view and self.casts and context is None and id(parameter) not in self._kept

    def was_kept(self, parameter: torch.Tensor) -> None:
        """A script has kept a view of a bucket over a round: from the next layout on, it gets none any more."""
        self._kept.add(id(parameter))
        self._as_view = self._as_view and len(self._kept) < MANY_KEPT

    def densified(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return a sparse gradient as a dense one; None when it is to stay sparse."""
        if gradient.layout is torch.strided:
            return gradient
        if not self.sparse_as_dense:
            return None
        if gradient.layout is torch.sparse_coo:
            self._sparse_dims_of[id(parameter)] = gradient.sparse_dim()
        return gradient.to_dense()

    def restored_dims(self, parameter: torch.Tensor) -> int:
        """Return how many dimensions of the reduced gradient are to be sparse, as in the gradient that came in."""
        return self._sparse_dims_of.get(id(parameter), self._unseen_sparse_dims) if self.sparse_as_dense else 0


def _sparse_dims(parameter: torch.Tensor, row_bytes: int, dtype: torch.dtype) -> int:
    """Return how many of the first dimensions are sparse, given the bytes of a row."""
    for dims in range(1, parameter.dim() + 1):
        if 8 * dims + dtype.itemsize * parameter.shape[dims:].numel() == row_bytes:
            return dims
    raise UnsupportedError(f"a sparse gradient with rows of {row_bytes} bytes does not fit a parameter of shape "
                           f"{list(parameter.shape)}")
