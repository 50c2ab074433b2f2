"""Places of learned buckets in a GPU's memory, of which `.grad` are views.

When the last gradient of a bucket is computed, one kernel copies all of them to the bucket, on the stream that computed
them, so torch's allocator may reuse their memory immediately. The kernel also compresses, and multiplies by 1/N for an
average over N ranks. Another kernel decompresses a whole bucket.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.core.device import AnyArray, DeviceArray, Event
from hvdlite.handoff.buckets import LearnedBucket
from hvdlite_torch.arrays import cuda
from hvdlite_torch.gradients.places import Place, TorchPlaces

_stride, _address, _size = torch.Tensor.stride, torch.Tensor.data_ptr, torch.Tensor.numel
_dtype = operator.attrgetter("dtype")


class GpuPlaces(TorchPlaces):
    """Like `TorchPlaces`, in the memory of one GPU."""

    _is_on_gpu = True

    def __init__(self, gradients: Any, bucket: LearnedBucket, parameters: Sequence[torch.Tensor]) -> None:
        assert isinstance(bucket.memory, DeviceArray)
        self._index = bucket.memory.device
        self._has_others = False  # other streams have computed gradients of this round
        self._bucket = bucket
        self._seen = set[int]()  # streams on which the memory has been used
        dtype = str(bucket.memory.dtype)
        if bucket.prescale and gradients.plane.batched_copy([], dtype, dtype, 0, bucket.prescale):
            bucket.prescaled = bucket.prescale
        super().__init__(gradients, bucket, parameters)

    def fill(self, places: Sequence[int], gradients: Sequence[torch.Tensor], is_own: bool) -> bool:
        self._outlive_stream()
        self._has_others = self._join_streams()  # also for gradients that are already in their views
        return super().fill(places, gradients, is_own)

    def take_back(self, places: Sequence[int]) -> Sequence[torch.Tensor]:
        if places and self._changes:
            torch._foreach_mul_([self.places[place].home for place in places], 1 / self._bucket.prescaled)
        return super().take_back(places)

    def results(self, places: Sequence[int] | None) -> Sequence[torch.Tensor]:
        self._outlive_stream()
        return super().results(places)

    def filled(self) -> Event | None:
        return self.gradients.plane.record_event(cuda.current_stream(self._index))

    def from_row_major(self, place: int, values: AnyArray) -> None:
        if isinstance(values, DeviceArray):
            self.places[place].home.copy_(cuda.as_tensor(values))
            if isinstance(values.owner, torch.Tensor):
                cuda.record_stream([values.owner])
        else:
            super().from_row_major(place, values)

    def _tensor(self, place: AnyArray) -> torch.Tensor:
        assert isinstance(place, DeviceArray)
        return cuda.as_tensor(place)

    def _belongs(self, place: Place, tensor: torch.Tensor) -> bool:
        return cuda.is_on_gpu(tensor)

    def _outlive_stream(self) -> None:
        """Let torch keep the bucket's memory, once it is dropped, until the current stream has used it: torch reuses it in
        the order of the stream for which the plane had it allocated, which may be another one."""
        stream, owner = cuda.current_stream(self._index), self._bucket.memory.owner  # type: ignore[union-attr]
        if stream not in self._seen:
            self._seen.add(stream)
            if isinstance(owner, torch.Tensor):
                cuda.record_stream([owner])

    def _join_streams(self) -> bool:
        """Make the current stream wait for all streams that computed gradients; return whether there are others."""
        stream = cuda.current_stream(self._index)
        others = self.gradients.streams - {stream}
        for other in others:
            self.gradients.plane.wait_stream(stream, other)
        return bool(others)

    @property
    def _changes(self) -> bool:
        return self._bucket.prescaled != 1.0

    def _copy_in(self, homes: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self._copy(homes, values, self._bucket.prescaled)
        if values is not homes:
            self._outlive_copy(values)

    def _copy(self, homes: list[torch.Tensor], values: list[torch.Tensor], factor: float = 1.0) -> None:
        """Copy tensors on the current stream, cast to the targets' dtypes and multiplied by the factor."""
        if list(map(_stride, values)) != list(map(_stride, homes)):
            homes, values = self._copy_other_strides(homes, values, factor)
        casts = list(zip(map(_dtype, values), map(_dtype, homes), strict=True))
        copies = list(zip(map(_address, values), map(_address, homes), map(_size, homes), strict=True))
        kinds, stream, plane = set(casts), cuda.current_stream(self._index), self.gradients.plane
        names = {dtype: cuda.dtype_name(dtype) for dtype in itertools.chain(*kinds)}
        if all(plane.batched_copy([], names[of], names[to], stream, factor) for of, to in kinds):
            for of, to in kinds:
                alike = copies if len(kinds) == 1 else [
                    copy for copy, cast in zip(copies, casts, strict=True) if cast == (of, to)]
                plane.batched_copy(alike, names[of], names[to], stream, factor)
        else:  # all by kernels, or none: gradients in their places would be multiplied twice
            torch._foreach_copy_(homes, values)
            if factor != 1.0:
                torch._foreach_mul_(homes, factor)

    def _copy_other_strides(self, homes: list[torch.Tensor], values: list[torch.Tensor],
                            factor: float) -> tuple[list[torch.Tensor], ...]:
        """Copy tensors whose elements have another order in memory; return the others."""
        in_order = [value.stride() == home.stride() or (value.is_contiguous() and home.is_contiguous())
                    for home, value in zip(homes, values, strict=True)]
        if others := [index for index, is_alike in enumerate(in_order) if not is_alike]:
            copied = [homes[index] for index in others]
            torch._foreach_copy_(copied, [values[index] for index in others])
            if factor != 1.0:
                torch._foreach_mul_(copied, factor)
        return list(itertools.compress(homes, in_order)), list(itertools.compress(values, in_order))

    def _outlive_copy(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._has_others:  # their memory returns to streams that do not wait for this copy
            cuda.record_stream(tensors)
