"""One rank's learned buckets: where their members lie in this rank's memory, and what waits for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array, identity
from hvdlite.negotiation.controller import Expanded
from hvdlite.negotiation.messages import Bucket, BucketReady, Layout
from hvdlite.planes.base import FusionBuffer, Part
from hvdlite.runtime.calls import Entry
from hvdlite.runtime.handle import Handle, Sleepers

ALIGNMENT = 4096
"""Bytes; buckets begin at multiples of it within a fusion buffer."""


class BucketHandle(Handle):
    """A bucket in flight.

    Attributes:
        parts: after completion, its members' own handles when they are answered one by one, else empty.
        nobody: after completion, the indices of members to which no rank contributed.
    """

    __slots__ = ("nobody", "parts")

    def __init__(self, name: str, sleepers: Sleepers) -> None:
        super().__init__(name, sleepers)
        self.parts: tuple[Handle, ...] = ()
        self.nobody: frozenset[int] = frozenset()


class LearnedBucket:
    """A bucket with memory.

    Attributes:
        memory: the whole bucket on this rank, flat, padding included.
        places: each member's part of `memory`, flat, in order.
    """

    def __init__(self, definition: Bucket, part: Part) -> None:
        self.definition = definition
        self.part = part
        self.memory: Array = part.buffer.own[part.begin:part.end].view(SUPPORTED_DTYPES[definition.response.dtype])
        self.places: tuple[Array, ...] = tuple(
            self.memory[offset:offset + math.prod(member.shape)]
            for member, offset in zip(definition.members, definition.offsets, strict=True))

    def logical(self, index: int) -> Array:
        """Return a member's place as an array of its shape, in the order in which the framework lays it out."""
        member, place = self.definition.members[index], self.places[index]
        if not member.strides:
            return place.reshape(member.shape)
        strides = tuple(step * place.itemsize for step in member.strides)
        return np.lib.stride_tricks.as_strided(place, member.shape, strides)

    def row_major(self, index: int) -> Array:
        """Return a member's values in row-major order: its place itself where that is the order."""
        return np.asarray(self.logical(index), order="C")

    def settle(self, index: int, values: Array) -> None:
        """Put a member's row-major values back into its place, unless they lie there."""
        if self.definition.members[index].strides:
            np.copyto(self.logical(index), values)

    def neutralise(self, index: int) -> None:
        """Give a member's place the value that changes nothing in the reduction."""
        self.places[index][...] = identity(self.definition.response.op, self.memory.dtype)


class LearnedLayout:
    """A layout with memory: one fusion buffer for all its buckets."""

    def __init__(self, layout: Layout, buffer: FusionBuffer) -> None:
        self.layout = layout
        buckets, begin = [], 0
        for definition in layout.buckets:
            end = begin + _nbytes(definition)
            buckets.append(LearnedBucket(definition, Part(buffer, begin, end)))
            begin = -(-end // ALIGNMENT) * ALIGNMENT
        self.buckets = tuple(buckets)


class BucketEntry:
    """A bucket between its report and its completion."""

    __slots__ = ("_abandoned", "_sleepers", "bucket", "handle", "ready")

    def __init__(self, bucket: LearnedBucket, ready: BucketReady, sleepers: Sleepers) -> None:
        self.bucket, self.ready = bucket, ready
        self._sleepers = sleepers
        self.handle = BucketHandle(bucket.definition.members[0].name, sleepers)
        self._abandoned = False

    def complete(self, nobody: Sequence[int]) -> None:
        """The bucket is reduced."""
        self.handle.nobody = frozenset(nobody)
        if not self._abandoned:
            self.handle._complete(None, self.bucket.definition.response.contributors)

    def split(self, expanded: Expanded) -> list[Entry]:
        """The bucket's members are answered one by one: return their entries, over the same memory."""
        entries = []
        for index, request in enumerate(expanded.requests):
            values = self.bucket.row_major(index)
            entries.append(Entry(request, [None if request.absent else values], [values], values, self._sleepers))
        self.handle.parts = tuple(entry.handle for entry in entries)
        if not self._abandoned:
            self.handle._complete(None, ())
        return entries

    def abandon(self, error: Exception) -> None:
        """Fail the handle now; again is fine."""
        if not self._abandoned:
            self.handle._fail(error)
        self._abandoned = True


def buffer_bytes(layout: Layout) -> int:
    """Return the size of the fusion buffer that a layout needs on each rank."""
    end = 0
    for definition in layout.buckets:
        end = -(-end // ALIGNMENT) * ALIGNMENT + _nbytes(definition)
    return end


def _nbytes(definition: Bucket) -> int:
    return definition.elements * SUPPORTED_DTYPES[definition.response.dtype].itemsize
