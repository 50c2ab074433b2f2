"""Learned buckets on one rank: the memory of their members, and the entries of buckets that are reported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.device import AnyArray, Completion, DeviceArray, Event
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.handle import BlockedWaiters, Handle
from hvdlite.negotiation.controller import SplitBucket
from hvdlite.negotiation.messages import Bucket, BucketReady, BucketRelease, Layout, Wait
from hvdlite.planes.base import BufferSlice, DevicePlane, FusionBuffer

ALIGNMENT = 4096
"""Bytes; buckets begin at multiples of it within a fusion buffer."""


class BucketHandle(Handle):
    """A bucket in flight.

    Attributes:
        parts: after completion, its members' own handles when they are answered one by one, else empty.
        globally_unused: after completion, the indices of members to which no rank contributed.
        partly_unused: after completion, the indices of members to which some ranks contributed, and others did not.
    """

    __slots__ = ("globally_unused", "partly_unused", "parts")

    def __init__(self, name: str, waiters: BlockedWaiters, waits_for: Wait) -> None:
        super().__init__(name, waiters, waits_for)
        self.parts: tuple[Handle, ...] = ()
        self.globally_unused: frozenset[int] = frozenset()
        self.partly_unused: tuple[int, ...] = ()


class LearnedBucket:
    """A bucket with memory.

    Attributes:
        memory: the whole bucket on this rank, flat, padding included.
        places: each member's part of `memory`, flat, in order.
        prescaled: by what gradients are multiplied when they are put in, on this rank: `prescale`, or 1.
    """

    prescaled = 1.0

    def __init__(self, definition: Bucket, buffer_slice: BufferSlice) -> None:
        self.definition = definition
        self.buffer_slice = buffer_slice
        dtype = SUPPORTED_DTYPES[definition.response.dtype]
        begin = buffer_slice.begin // dtype.itemsize
        self.memory: AnyArray = _part(buffer_slice.buffer.own, begin, definition.elements, dtype)
        self.places: tuple[AnyArray, ...] = tuple(
            _part(self.memory, offset, math.prod(member.shape), dtype)
            for member, offset in zip(definition.members, definition.offsets, strict=True))

    @property
    def prescale(self) -> float:
        """By what every rank's gradients are multiplied before they are summed."""
        response = self.definition.response
        return response.prescale_over(len(response.contributors))

    def logical(self, index: int) -> AnyArray:
        """Return a member's place as an array of its shape, in the order in which the framework lays it out."""
        member, place = self.definition.members[index], self.places[index]
        if isinstance(place, DeviceArray):
            return dataclasses.replace(place, shape=member.shape, strides=member.strides, prescale=self.prescaled)
        if not member.strides:
            return place.reshape(member.shape)
        strides = tuple(step * place.itemsize for step in member.strides)
        return np.lib.stride_tricks.as_strided(place, member.shape, strides)

    def row_major(self, index: int, ready: Event | None, devices: DevicePlane | None) -> AnyArray:
        """Return a member's values in row-major order: its place itself where that is the order.

        Args:
            ready: on a GPU: after which the place is filled.
            devices: copies places on GPUs.
        """
        place = self.logical(index)
        if isinstance(place, DeviceArray):
            if not place.strides:
                return place.after(ready)
            assert devices is not None
            return devices.row_major(place.after(ready))
        return np.asarray(place, order="C")


class LearnedLayout:
    """A layout with memory: a fusion buffer for all its buckets on the host, and one for those on a GPU.

    Attributes:
        is_suspended: whether it is not used, until all ranks have joined.
    """

    def __init__(self, layout: Layout, buffers: Mapping[str, FusionBuffer]) -> None:
        self.layout = layout
        self.is_suspended = False
        buckets, begins = [], dict.fromkeys(buffers, 0)
        for definition in layout.buckets:
            device = definition.response.device
            begin, end = begins[device], begins[device] + _nbytes(definition)
            buckets.append(LearnedBucket(definition, BufferSlice(buffers[device], begin, end)))
            begins[device] = -(-end // ALIGNMENT) * ALIGNMENT
        self.buckets = tuple(buckets)


class BucketEntry:
    """A bucket between its report and its completion."""

    __slots__ = ("_abandoned", "_event", "_waiters", "bucket", "handle", "ready")

    def __init__(self, bucket: LearnedBucket, ready: BucketReady, waiters: BlockedWaiters,
                 event: Event | None = None) -> None:
        self.bucket, self.ready, self._event = bucket, ready, event
        self._waiters = waiters
        first, process_set = bucket.definition.members[0], bucket.definition.response.process_set_id
        self.handle = BucketHandle(first.name, waiters, Wait(process_set, first.label, ready.round_id))
        self._abandoned = False

    @property
    def memory(self) -> AnyArray:
        """The bucket's values in this round."""
        memory = self.bucket.memory
        if not isinstance(memory, DeviceArray):
            return memory
        return dataclasses.replace(memory, ready=self._event, prescale=self.bucket.prescaled)

    def complete(self, release: BucketRelease, completion: Completion | None) -> None:
        """The bucket is reduced; on a GPU, after `completion`."""
        self.handle.globally_unused, self.handle.partly_unused = frozenset(release.globally_unused), release.partly_unused
        self.handle.ranks_in_step = release.ranks_in_step
        if completion is not None:
            completion = completion.for_entry(self.bucket)
        if not self._abandoned:
            self.handle._complete(None, self.bucket.definition.response.contributors, completion)

    def split(self, split: SplitBucket, devices: DevicePlane | None) -> list[Entry]:
        """The bucket's members are answered one by one: return their entries, over the same memory.

        Args:
            devices: copies places on GPUs.
        """
        entries = []
        for index, request in enumerate(split.requests):
            values = self.bucket.row_major(index, self._event, devices)
            entries.append(Entry(request, [None if request.absent else values], [values], values, self._waiters))
        self.handle.parts = tuple(entry.handle for entry in entries)
        if not self._abandoned:
            self.handle._complete(None, ())
        return entries

    def abandon(self, error: Exception) -> None:
        """Fail the handle now; again is fine."""
        if not self._abandoned:
            self.handle._fail(error)
        self._abandoned = True


def buffer_bytes(layout: Layout) -> dict[str, int]:
    """Return the size of the fusion buffers that a layout needs on each rank, by device."""
    ends: dict[str, int] = {}
    for definition in layout.buckets:
        device = definition.response.device
        ends[device] = -(-ends.get(device, 0) // ALIGNMENT) * ALIGNMENT + _nbytes(definition)
    return ends


def _part(memory: AnyArray, begin: int, count: int, dtype: np.dtype[Any]) -> AnyArray:
    """Return `count` elements of `dtype` from `begin`, counted in such elements."""
    if isinstance(memory, DeviceArray):
        return memory.part(begin, count, dtype)
    width = dtype.itemsize // memory.itemsize
    return memory[begin * width:(begin + count) * width].view(dtype)


def _nbytes(definition: Bucket) -> int:
    return definition.elements * SUPPORTED_DTYPES[definition.response.dtype].itemsize
