"""Gradients on a GPU, for `training.GradientReducer`: learned buckets in the GPU's memory, of which `.grad` are views.

When the last gradient of a bucket is computed, one kernel copies all of them to the bucket, on the stream that computed
them, so torch's allocator may reuse their memory immediately. The kernel also compresses. Another kernel decompresses a
whole bucket, into memory that is kept. Gradients that are already in their bucket (`zero_grad(set_to_none=False)`) are not
copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.core.device import AnyArray, Completion, CopySpec, DeviceAccess, DeviceArray, Event
from hvdlite.core.types import Collective
from hvdlite_torch import cuda
from hvdlite_torch.bucket_views import BucketView, fill_views
from hvdlite_torch.compression import Compressor
from hvdlite_torch.framework import TorchGradients


class CudaGradients(TorchGradients):
    """Like `TorchGradients`, for parameters of which some are on a GPU."""

    needs_notes = True
    _devices: DeviceAccess

    def __init__(self, compression: type[Compressor], sparse_as_dense: bool, as_view: bool, devices: DeviceAccess) -> None:
        super().__init__(compression, sparse_as_dense, as_view, devices)
        self._streams: set[int] = set()  # streams that computed gradients since the last wait for buckets
        self._index = 0  # of the GPU

    def note(self, parameter: torch.Tensor) -> None:
        """Record that a gradient was computed on this thread's current stream."""
        self._streams.add(cuda.current_stream(cuda.cuda_index(parameter)))

    def bucket_view(self, parameter: torch.Tensor, place: AnyArray) -> BucketView:
        if not isinstance(place, DeviceArray):
            return super().bucket_view(parameter, place)
        self._index = place.device
        return BucketView(cuda.as_tensor(place), self._wire(parameter)[1], on_gpu=True)

    def batch(self, pairs: Sequence[tuple[torch.Tensor, BucketView]]) -> Sequence[tuple[torch.Tensor, BucketView]]:
        return pairs if pairs and pairs[0][1].on_gpu else super().batch(pairs)

    def fill(self, parameter: torch.Tensor, view: BucketView) -> bool:
        return self.fill_all([(parameter, view)]) if view.on_gpu else super().fill(parameter, view)

    def fill_all(self, pairs: Sequence[tuple[torch.Tensor, BucketView]]) -> bool:
        if not pairs[0][1].on_gpu:  # a bucket is in one place
            return super().fill_all(pairs)
        others = self._join_streams()  # also for gradients that are already in their views

        def copy(homes: list[torch.Tensor], values: list[torch.Tensor]) -> None:
            self._copy(homes, values)
            if others:  # their memory returns to streams that do not wait for this copy
                cuda.record_stream(values)
        return fill_views(pairs, self._fitting, copy)

    def filled(self, memory: AnyArray) -> Event | None:
        if not isinstance(memory, DeviceArray):
            return None
        return self._devices.record_event(cuda.current_stream(memory.device))

    def copy_from_row_major(self, view: BucketView, values: AnyArray) -> None:
        if isinstance(values, DeviceArray):
            view.home.copy_(cuda.as_tensor(values))
        else:
            super().copy_from_row_major(view, values)

    def detach_view(self, parameter: torch.Tensor, view: BucketView) -> Any:
        return super().detach_view(parameter, view) if view.context is None else None

    def install_view(self, parameter: torch.Tensor, view: BucketView) -> Any:
        return self.install_views([(parameter, view)])[0] if view.on_gpu else super().install_view(parameter, view)

    def install_views(self, pairs: Sequence[tuple[torch.Tensor, BucketView]]) -> Sequence[Any]:
        if not pairs or not pairs[0][1].on_gpu:
            return super().install_views(pairs)
        homes, targets, shown = [], [], []
        for parameter, view in pairs:
            if view.context is None and self._shows_views(parameter):
                shown.append(view)
                continue
            if not self._as_view:
                view.copy = None
            shown.append(view.private_copy(parameter))
            homes.append(view.home)
            targets.append(shown[-1].home)
        if homes:
            self._copy(targets, homes)
        return [view.give_to(parameter) for (parameter, _), view in zip(pairs, shown, strict=True)]

    def follow(self, completion: Completion) -> None:
        super().follow(completion)
        self._streams.clear()

    def _join_streams(self) -> bool:
        """Make the current stream wait for all streams that computed gradients; return whether there are others."""
        stream = cuda.current_stream(self._index)
        others = self._streams - {stream}
        for other in others:
            self._devices.wait_stream(stream, other)
        return bool(others)

    def _fitting(self, parameter: torch.Tensor, gradient: torch.Tensor, view: BucketView) -> torch.Tensor | None:
        return super()._fitting(parameter, gradient, view) if self._belongs(gradient, view) else None

    def _belongs(self, tensor: torch.Tensor, view: BucketView) -> bool:
        """Return whether a view is in the memory where a gradient like `tensor` is reduced: models are moved."""
        if not cuda.is_on_gpu(tensor):
            return not view.on_gpu
        return view.on_gpu or not self._devices.supports(Collective.ALLREDUCE, None, cuda.dtype_name(view.dtype))

    def _suits(self, parameter: torch.Tensor, view: BucketView) -> bool:
        return self._belongs(parameter, view) and super()._suits(parameter, view)

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy tensors on the current stream, cast to the targets' dtypes."""
        stream = cuda.current_stream(self._index)
        alike: dict[tuple[torch.dtype, torch.dtype], list[CopySpec]] = {}
        rest: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for target, source in zip(targets, sources, strict=True):
            if source.stride() == target.stride() or (source.is_contiguous() and target.is_contiguous()):
                alike.setdefault((source.dtype, target.dtype), []).append(
                    (source.data_ptr(), target.data_ptr(), source.numel()))
            else:
                rest[0].append(target)
                rest[1].append(source)
        for (of, to), pairs in alike.items():
            if not self._devices.batched_copy(pairs, cuda.dtype_name(of), cuda.dtype_name(to), stream):
                rest = (list(targets), list(sources))
                break
        if rest[0]:
            torch._foreach_copy_(rest[0], rest[1])
