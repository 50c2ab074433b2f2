"""A reducer that leaves the reduction of a whole round to a function: for lossy schemes with state of their own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.core.errors import HvdliteError, MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.declared import Moment
from hvdlite.runtime.handle import Handle, WaitDeferred
from hvdlite.training.framework import Parameter
from hvdlite.training.gradient_reducer import GradientReducer, Phase

_DIGEST = 4
"""Bytes of the digest of the members' names."""
ReduceRound = Callable[[Sequence[tuple[str, Parameter, bool]]], Sequence[tuple[Parameter, Any]]]
"""Reduce the gradients of (name, parameter, has one here), which some rank has; return the parameters and their marks."""


class HookedReducer(GradientReducer[Parameter]):
    """Like `GradientReducer`, but everything is reduced when the round is closed, by `reduce_round`.

    Ranks tell each other first which gradients they have. That is also where they find out that they have other members or
    have made different numbers of rounds, and where a wait is deferred when ranks wait for each other in a circle. Once a
    rank has deferred a wait, it may have told what it has long before it comes to the reduction, which blocks. Then all
    ranks say in addition when they come to it, and that wait can be deferred too.
    """

    _moves_gradients = False

    def use(self, reduce_round: ReduceRound[Parameter]) -> None:
        """Take the function; before the first round."""
        self._reduce_round = reduce_round
        self._present: dict[int, bool] = {}  # members that were handed over, by identity: whether they have a gradient
        # Of the closed round: for each member whether some rank has a gradient; whether some rank has ever deferred a wait;
        # the bytes of the digests of the members' names, and their complements.
        self._anywhere: Handle | None = None
        self._entered: Handle | None = None  # of the closed round: done when all ranks come to the reduction

    def _begin(self) -> None:
        self._next_number()
        self._present = {}

    def _close_round(self) -> None:
        if self._phase is Phase.CLOSED:
            return
        self._begin_round()
        for member in self._members.values():
            if member.given != self._number:
                self._give(member, self._is_present(member))
        digest = self._digest()
        flags = [*(self._present[key] for key in self._members), self._runtime.has_deferred]
        self._anywhere = self._ask("present", [*flags, *digest, *(255 - byte for byte in digest)])
        self._entered = None
        self._closed()

    def _digest(self) -> bytes:
        return zlib.crc32("\n".join(member.name for member in self._members.values()).encode()).to_bytes(_DIGEST, "little")

    def _ask(self, name: str, values: Sequence[int]) -> Handle:
        """Return the handle of the largest values (0 to 255) over all ranks."""
        array = np.array(values, np.uint8)
        return self._runtime.declare(f"{self._label}.{name}", array, np.empty_like(array), ReduceOp.MAX,
                                     Moment("", 0, self._steps, self._in_step), process_set=self._process_set)

    def _give(self, member: Any, present: bool) -> None:
        self._present[id(member.parameter)] = present
        member.given = self._number
        if not present:
            member.missing = self._number

    def _collect(self, errors: list[HvdliteError], deferrable: bool) -> None:
        """Reduce what the closed round has."""
        assert self._anywhere is not None
        try:
            answer = self._anywhere.wait(deferrable=deferrable)
            anywhere, may_block = answer[:len(self._members)], answer[len(self._members)]
            largest, of_complements = answer[-2 * _DIGEST:-_DIGEST], answer[-_DIGEST:]
            if (largest != 255 - of_complements).any():  # then some rank has other bytes
                raise MismatchError(f"ranks disagree about the members of '{self._label}', of which rank "
                                    f"{self._runtime.world.rank} has {len(self._members)}. Give the optimizer the same "
                                    "parameters on all ranks (add_param_group and requires_grad too)")
            self._note_behind(self._anywhere.behind)
            if may_block:
                self._entered = self._entered or self._ask("entered", [])
                self._entered.wait(deferrable=deferrable)
            reduced = self._reduce_round([(member.name, member.parameter, self._present[key])
                                          for (key, member), wanted in zip(self._members.items(), anywhere, strict=True)
                                          if wanted])
        except WaitDeferred:
            raise
        except HvdliteError as error:
            errors.append(error)
            return
        except BaseException:
            self._end_round()  # it cannot be taken up again in the middle
            raise
        for parameter, mark in reduced:
            self._mark(self._members[id(parameter)], mark)
