"""Shares that change at random from batch to batch, alike on all ranks."""

from __future__ import annotations

import random

from hvdlite.training.mirrored.shards import Split
from hvdlite.training.mirrored.shares import Shares, SharesPass


def draw_shares(shares: Shares, seed: int) -> None:
    """Let the number of a batch draw its shares, of a strategy or loop with "auto"."""
    def at(number: int, caller: SharesPass) -> Split:
        rng = random.Random(f"shares {seed} {number}")
        return shares.first._replace(shares=tuple(rng.choice((0.1, 1.0, rng.random() + 0.01)) for _ in shares.first.shares))
    setattr(shares, "at", at)  # noqa: B010 - a method
