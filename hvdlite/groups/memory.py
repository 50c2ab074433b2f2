"""The memory of a group on one host: its area, the lines of its rings, and a segment for its plane."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.core.array import Array
from hvdlite.memory.area import Area, area_bytes
from hvdlite.memory.rings import pair_bytes
from hvdlite.memory.shared import PAGE, Range, Segment, counter_bytes, segment_bytes


class GroupMemory:
    """Implements `planes.staging.HostMemory` for the plane of a group, which needs one segment.

    Args:
        ranks: number of ranks of the group on this host.
        slot: bytes of a staging slot.

    Attributes:
        nbytes: of the range that it needs.
        pairs: the lines of the rings.
    """

    def __init__(self, ranks: int, slot: int) -> None:
        self._ranks = ranks
        self._pairs_at = _padded(area_bytes(ranks))
        self._segment_at = self._pairs_at + _padded(pair_bytes(ranks))
        self.nbytes = self._segment_at + segment_bytes(ranks, slot)
        self.pairs = memoryview(b"")

    def area(self, taken: Range, index: int) -> Area:
        """Use a range; return the area of this rank, which has this index on its host.

        Raises:
            MemoryError: if the system has no memory left.
        """
        taken.allocate(0, self._segment_at + counter_bytes(self._ranks))
        self._range, self._index = taken, index
        self.pairs = taken.bytes[self._pairs_at:self._pairs_at + pair_bytes(self._ranks)].data
        return Area(taken.bytes[:area_bytes(self._ranks)], index, self._ranks)

    def segment(self, ranks: Sequence[int], slot: int) -> Segment:
        part = self._range.part(self._segment_at, segment_bytes(self._ranks, slot))
        return Segment(part, self._index, self._ranks, slot)

    def window(self, nbytes: int, ranks: Sequence[int]) -> list[Array]:
        raise MemoryError("a group has no fusion buffers")

    def close(self) -> None:
        pass


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
