"""Gradients on a GPU, for `training.GradientReducer`: learned buckets in the GPU's memory, of which `.grad` are views.

A bucket's gradients are copied into it by one kernel when the last one is there, on the stream on which they were made, so
torch's allocator may use their memory again at once. Compression is a part of that kernel; the way back is one kernel for a
whole bucket, into memory that is kept. Gradients that lie in their bucket already (`zero_grad(set_to_none=False)`) are not
copied at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.core.device import AnyArray, Completion, CopySpec, DeviceAccess, DeviceArray, Event
from hvdlite.core.types import Collective
from hvdlite_torch import cuda
from hvdlite_torch.compression import Compressor
from hvdlite_torch.framework import TorchGradients
from hvdlite_torch.seats import Seat, fill_seats


class CudaGradients(TorchGradients):
    """Like `TorchGradients`, for parameters of which some are on a GPU."""

    _devices: DeviceAccess

    def __init__(self, compression: type[Compressor], sparse_as_dense: bool, as_view: bool, devices: DeviceAccess) -> None:
        super().__init__(compression, sparse_as_dense, as_view, devices)
        self._streams: set[int] = set()  # on which gradients were made since buckets were last waited for
        self._index = 0  # of the GPU

    def note(self, parameter: torch.Tensor) -> None:
        """A gradient was made on the stream that is current on this thread."""
        self._streams.add(cuda.current_stream(cuda.index_of(parameter)))

    def seat(self, parameter: torch.Tensor, place: AnyArray) -> Seat:
        if not isinstance(place, DeviceArray):
            return super().seat(parameter, place)
        self._index = place.device
        return Seat(cuda.over(place), self._wire(parameter)[1], on_gpu=True)

    def batch(self, pairs: Sequence[tuple[torch.Tensor, Seat]]) -> Sequence[tuple[torch.Tensor, Seat]]:
        return pairs if pairs and pairs[0][1].on_gpu else super().batch(pairs)

    def fill(self, parameter: torch.Tensor, seat: Seat) -> bool:
        return self.fill_all([(parameter, seat)]) if seat.on_gpu else super().fill(parameter, seat)

    def fill_all(self, pairs: Sequence[tuple[torch.Tensor, Seat]]) -> bool:
        if not pairs[0][1].on_gpu:  # a bucket is in one place
            return super().fill_all(pairs)
        others = self._join_streams()  # also for what lies in its seat already

        def copy(homes: list[torch.Tensor], values: list[torch.Tensor]) -> None:
            self._copy(homes, values)
            if others:  # their memory goes back to streams that are not behind this
                cuda.outlive(values)
        return fill_seats(pairs, self._fitting, copy)

    def filled(self, memory: AnyArray) -> Event | None:
        if not isinstance(memory, DeviceArray):
            return None
        return self._devices.record_event(cuda.current_stream(memory.device))

    def settle(self, seat: Seat, values: AnyArray) -> None:
        if isinstance(values, DeviceArray):
            seat.home.copy_(cuda.over(values))
        else:
            super().settle(seat, values)

    def vacate(self, parameter: torch.Tensor, seat: Seat) -> Any:
        return super().vacate(parameter, seat) if seat.context is None else None

    def adopt(self, parameter: torch.Tensor, seat: Seat) -> Any:
        return self.adopt_all([(parameter, seat)])[0] if seat.on_gpu else super().adopt(parameter, seat)

    def adopt_all(self, pairs: Sequence[tuple[torch.Tensor, Seat]]) -> Sequence[Any]:
        if not pairs or not pairs[0][1].on_gpu:
            return super().adopt_all(pairs)
        homes, targets, shown = [], [], []
        for parameter, seat in pairs:
            if seat.context is None and self._shows_views(parameter):
                shown.append(seat)
                continue
            if not self._as_view:
                seat.copy = None
            shown.append(seat.private_copy(parameter))
            homes.append(seat.home)
            targets.append(shown[-1].home)
        if homes:
            self._copy(targets, homes)
        return [seat.give_to(parameter) for (parameter, _), seat in zip(pairs, shown, strict=True)]

    def follow(self, completion: Completion) -> None:
        super().follow(completion)
        self._streams.clear()

    def _join_streams(self) -> bool:
        """Let the current stream come after all streams that made gradients; return whether there are others."""
        stream = cuda.current_stream(self._index)
        others = self._streams - {stream}
        for other in others:
            self._devices.wait_stream(stream, other)
        return bool(others)

    def _fitting(self, parameter: torch.Tensor, gradient: torch.Tensor, seat: Seat) -> torch.Tensor | None:
        return super()._fitting(parameter, gradient, seat) if self._belongs(gradient, seat) else None

    def _belongs(self, tensor: torch.Tensor, seat: Seat) -> bool:
        """Return whether a seat is in the memory where a gradient like `tensor` is reduced: models are moved."""
        if not cuda.is_on_gpu(tensor):
            return not seat.on_gpu
        return seat.on_gpu or not self._devices.supports(Collective.ALLREDUCE, None, cuda.name_of(seat.dtype))

    def _suits(self, parameter: torch.Tensor, seat: Seat) -> bool:
        return self._belongs(parameter, seat) and super()._suits(parameter, seat)

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
            if not self._devices.batched_copy(pairs, cuda.name_of(of), cuda.name_of(to), stream):
                rest = (list(targets), list(sources))
                break
        if rest[0]:
            torch._foreach_copy_(rest[0], rest[1])
