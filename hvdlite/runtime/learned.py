"""What a world of an elastic job has learned, and the next one begins with: layouts, and knobs that were tuned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hvdlite.negotiation.messages import Layout


@dataclasses.dataclass(frozen=True)
class Learned:
    """What rank 0 announces in the first decision of a world (docs/protocol.md#carried-layouts).

    Attributes:
        layouts: by the labels of their gradient sets in the world that begins.
        tuned: knobs, and their values.
    """

    layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    tuned: Mapping[str, int] = dataclasses.field(default_factory=dict)
