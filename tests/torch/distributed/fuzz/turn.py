"""One rank's part of a call: what it draws, and the tensors that it gives and gets."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.torch.distributed.fuzz.values import (
    ANY,
    Laid,
    Wanted,
    compare,
    ops_of,
    values,
)

SHAPES: Final = ((), (0,), (1,), (2, 0), (3,), (7,), (4, 5), (2, 3, 4), (64,), (33, 31), (1000,), (4099,))
LONG: Final = ((1 << 17,), (300, 1111))


class Turn:
    """One rank's part of one step.

    Attributes:
        ranks: the members of the group, as ranks of the job.
        rank: this rank's index in them.
        size: their number.
        common: draws what all members draw.
        own: draws what each rank draws for itself.
        shared: gets results that are to be equal on all members, bit by bit.
        told: gets what is called, for messages.
    """

    def __init__(self, seed: int, step: int, part: int, ranks: Sequence[int], me: int, group: Any) -> None:
        self.key = (seed, step, part)
        self.ranks, self.rank, self.size, self.group = tuple(ranks), list(ranks).index(me), len(ranks), group
        self.common, self.own = random.Random(f"{seed} {step} {part}"), random.Random(f"{seed} {step} {part} {me}")
        self.shared: list[torch.Tensor] = []
        self.told: list[str] = []
        self.is_async = self.own.random() < 0.5
        self._laid: list[Laid] = []
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def shape(self) -> tuple[int, ...]:
        return self.common.choice(LONG if self.common.random() < 0.04 else SHAPES)

    def dtype(self, among: Sequence[torch.dtype] = ANY) -> torch.dtype:
        dtype = self.common.choice(among)
        self.told.append(str(dtype).removeprefix("torch."))
        return dtype

    def root(self) -> int:
        root = self.common.randrange(self.size)
        self.told.append(f"root {root}")
        return root

    def op(self, dtype: torch.dtype) -> tuple[str, Any, list[float]]:
        """Return the name of an operation, the operation, and the ranks' factors."""
        name, factors = self.common.choice(ops_of(dtype)), [self.common.choice([0.5, 1.0, 2.0, -3.0]) for _ in self.ranks]
        self.told.append(name)
        op = dist._make_nccl_premul_sum(factors[self.rank]) if name == "PREMUL_SUM" else getattr(ReduceOp, name)
        return name, op, factors

    def drawn(self, shape: Sequence[int], dtype: torch.dtype, rank: int | None = None, part: int = 0) -> torch.Tensor:
        """Return the values of a rank's tensor, by default this one's."""
        return values((*self.key, self.ranks[self.rank if rank is None else rank], part), shape, dtype)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input with these values, which no call may change."""
        laid = self.changed(tensor)
        self._inputs.append((laid, tensor))
        return laid

    def changed(self, tensor: torch.Tensor, *, is_contiguous: bool = False) -> torch.Tensor:
        """Return a tensor with these values, which the call changes."""
        laid = Laid(self.own, tensor, is_contiguous=is_contiguous)
        self.told.append(f"{laid.kind}{list(tensor.shape)}")
        self._laid.append(laid)
        return laid.tensor

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor for a result."""
        return self.changed(values((99, *self.key), shape, dtype))

    def check(self, name: str) -> None:
        for laid in self._laid:
            laid.check_gaps(name)
        for laid, tensor in self._inputs:
            compare(f"{name}: the input", laid, Wanted(tensor))


Begun = tuple[Any, Callable[[], None]]
"""A work, or None for what is done, and what checks the result."""


def comparing(name: str, pairs: Sequence[tuple[torch.Tensor, Wanted]]) -> Callable[[], None]:
    def check() -> None:
        for index, (found, wanted) in enumerate(pairs):
            compare(f"{name}: result {index}", found, wanted)
    return check
