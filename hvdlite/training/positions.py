"""The rest of an epoch, from a position that is a number of samples: which of them are a rank's, and in which batches.

An epoch has one order of samples for all ranks. A position is the number of samples at its beginning that finished steps of
all ranks together have consumed, so any number of ranks can go on from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def rank_share(order: Sequence[T], consumed: int, rank: int, size: int, *, drops: bool = False) -> list[T]:
    """Return a rank's samples of the rest of an epoch; ranks take them by turns, and all equally many.

    From the beginning of an epoch this is what `torch.utils.data.DistributedSampler` gives a rank; after steps of as many
    ranks, it is the rest of that.

    Args:
        consumed: samples.
        drops: leave out the last samples if they do not suffice for all ranks, instead of repeating the first ones.
    """
    left = order[consumed:]
    short = -len(left) % size
    if drops:
        left = left[:len(left) // size * size]
    elif short:
        left = [*left, *itertools.islice(itertools.cycle(order), short)]
    return list(left[rank::size])


def batches(samples: Sequence[T], length: int, *, drops: bool = False) -> Iterator[Sequence[T]]:
    """Yield batches of a number of samples; the last one may be shorter.

    Args:
        drops: leave out a shorter one.
    """
    end = len(samples) // length * length if drops else len(samples)
    return (samples[begin:begin + length] for begin in range(0, end, length))
