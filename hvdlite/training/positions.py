"""The rest of an epoch, from a position that is a number of samples: which of them are a rank's, and in which steps.

An epoch has one order of samples for all ranks. A position is the number of samples at its beginning that finished steps of
all ranks together have consumed, so any number of ranks can go on from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

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


def by_turns(order: Sequence[T], consumed: int, rank: int, size: int, length: int = 1, *, drops: bool = False,
             drops_batch: bool = False) -> list[tuple[int, Sequence[T]]]:
    """Return the steps of a rank of which each takes a batch of `rank_share`: the position after a step, and its samples.

    One rank's steps are the global batches.

    Args:
        length: samples of one rank's batch.
        drops: as in `rank_share`.
        drops_batch: leave out a last batch that is shorter.
    """
    share = rank_share(order, consumed, rank, size, drops=drops)
    end = len(share) // length * length if drops_batch else len(share)
    cut = [share[begin:begin + length] for begin in range(0, end, length)]
    return [(min(consumed + end * size, len(order)), batch)
            for end, batch in zip(itertools.accumulate(map(len, cut)), cut, strict=True)]


def refuse_other(state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Compare what an order depends on with what it was when a place was saved; at the begin of an epoch anything fits.

    Args:
        state: of the place: `epoch`, `consumed`, and the facts then.
        facts: those of the present data.

    Raises:
        ValueError: when they differ in the middle of an epoch.
    """
    for name, here in facts.items() if state["consumed"] else ():
        if state[name] != here:
            raise ValueError(f"the place {state['consumed']} in epoch {state['epoch']} does not fit these data: {name} was "
                             f"{state[name]!r} when it was saved, and is {here!r} here. Make them as they were, or begin an "
                             "epoch (set consumed to 0)")
