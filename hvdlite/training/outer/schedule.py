"""Which fragment is exchanged when, and which parameters are in it: the same on all ranks, without asking them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass
class Schedule:
    """The steps at which exchanges begin. Fragment f is merged at the steps t with t % every == f * every // fragments.

    Attributes:
        every: steps between two exchanges of a fragment.
        fragments: their number.
        delay: steps from the begin of an exchange to its merge, less than `every`. It may change between steps.
    """

    every: int
    fragments: int
    delay: int

    @property
    def longest_delay(self) -> int:
        """The delay with which at most one fragment is under way."""
        return max(0, self.every // max(1, self.fragments) - 1)

    def beginning(self, step: int) -> list[int]:
        """Return the fragments whose exchange begins when a step, counted from 1, is done."""
        place = (step + self.delay) % self.every
        return [fragment for fragment in range(self.fragments) if fragment * self.every // self.fragments == place]


def divide(sizes: Sequence[int], fragments: int) -> list[range]:
    """Return the indices of the parameters of each fragment: neighbours, together about as large as those of the others.

    Args:
        sizes: of all parameters.
        fragments: how many there are at most; fewer where a parameter is larger than a fragment should be.
    """
    total, ends = sum(sizes), itertools.accumulate(sizes)
    # By the middle of each parameter in the whole.
    fragment_of = [min(fragments - 1, (2 * end - size) * fragments // (2 * total) if total else 0)
                   for size, end in zip(sizes, ends, strict=True)]
    found = []
    for _, members in itertools.groupby(range(len(sizes)), fragment_of.__getitem__):
        indices = list(members)
        found.append(range(indices[0], indices[-1] + 1))
    return found
