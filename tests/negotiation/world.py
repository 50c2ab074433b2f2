"""What the ranks of a world of the model of elastic training share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Operation:
    """An operation of a plane.

    Attributes:
        what: what identifies it on every rank.
        brought: what each rank has brought to it, by name.
        results: by name, as far as they are reduced.
        reduced: the ranks that have reduced their shares.
    """

    what: object
    brought: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    reduced: set[int] = dataclasses.field(default_factory=set)


class World:
    """What the ranks of a world share.

    Attributes:
        groups: the ranks of each host that has a leader.
        operations: of the plane, in the order of decisions.
    """

    def __init__(self, members: Sequence[int], groups: Sequence[tuple[int, ...]]) -> None:
        self.members = tuple(members)
        self.groups = groups
        self.operations: list[Operation] = []
