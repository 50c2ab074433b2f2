"""A reducer that leaves the reduction of a whole round to a function: for lossy schemes with state of their own."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import Handle, WaitDeferred
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.training.framework import Parameter
from hvdlite.training.gradient_reducer import GradientReducer
from hvdlite.training.phases import Phase

_DIGEST = 4
"""Bytes of a digest."""
ReduceRound = Callable[[Sequence[tuple[str, Parameter, bool]], Callable[[], object]], Sequence[tuple[Parameter, Any]]]
"""Reduce the gradients of (name, parameter, has one here), which some rank has; return the parameters and their marks.

Names are those that `add` was given. The function calls the second argument before it waits for another rank. `WaitDeferred`
can come out of that, and out of the function; then the function is called again.
"""


class HookedReducer(GradientReducer[Parameter]):
    """Like `GradientReducer`, but everything is reduced when the round is closed, by `reduce_round`.

    Ranks tell each other first which gradients they have. That is also where they find out that they have other members or
    have made different numbers of rounds, and where a wait is deferred when ranks wait for each other in a circle. Once a
    rank has deferred a wait, it may have told what it has long before it comes to the reduction, which blocks. Then all
    ranks say in addition when they come to it, and that wait can be deferred too.

    A rank that has exactly the gradients that some rank had in the last round does not wait for the answer before it starts
    to reduce these: the function starts its first collective, and waits for the answer before it waits for the result. When
    some rank has started in this way, all ranks reduce the last round's gradients first, and then what else there is.
    """

    _moves_gradients = False

    def use(self, reduce_round: ReduceRound[Parameter], *, is_repeatable: bool = False) -> None:
        """Take the function; before the first round.

        Args:
            is_repeatable: whether it can be called again with the same gradients after `WaitDeferred` came out of its second
                argument; otherwise it is called only when the answer is there.
        """
        self._reduce_round, self._is_repeatable = reduce_round, is_repeatable
        self._present: dict[int, bool] = {}  # members that were handed over, by identity: whether they have a gradient
        self._digests: dict[int, bytes] = {}  # of the members' names, by how many they are
        self._last: Array | None = None  # for each member whether some rank had a gradient in the last round; None: unknown
        # Of the closed round:
        self._asked: Handle | None = None  # flags and digests of all ranks, see `_close_round`
        self._entered: Handle | None = None  # done when all ranks come to the reduction
        self._answer: Array | None = None  # to what was asked, once it has been checked
        self._is_early = False  # this rank has started, or will start, to reduce the last round's gradients
        self._has_reduced_last = False  # the last round's gradients are reduced
        self._is_confirming = False  # an exception that comes now leaves nothing half done

    def _begin(self) -> None:
        joins = self._joins
        self._next_number()
        is_known = self._answer is not None and joins == self._joins
        self._last = self._answer if is_known else None
        self._answer = None
        self._present = {}

    def _close_round(self) -> None:
        if self._phase is Phase.CLOSED:
            return
        self._begin_round()
        for member in self._members.values():
            if member.given != self._number:
                self._give(member, self._is_present(member))
        present = np.fromiter(map(self._present.__getitem__, self._members), np.uint8, len(self._members))
        if self._last is not None and len(self._last) != len(present):
            self._last = None  # there are more members now
        has_deferred = self._runtime.has_deferred
        # Where reductions are idempotent, gradients may change while a wait is deferred.
        self._is_early = (self._is_repeatable and not self.gradients.is_idempotent and not has_deferred
                          and self._last is not None
                          and bool(present.any()) and np.array_equal(present, self._last))
        self._has_reduced_last = self._is_confirming = False
        of_last = _digest(b"" if self._last is None else self._last.tobytes())
        digests = np.frombuffer(self._names_digest() + of_last, np.uint8)
        self._asked = self._ask("present", np.concatenate(
            [present, np.array([has_deferred, self._is_early], np.uint8), digests, 255 - digests]))
        self._entered = None
        self._closed()

    def _names_digest(self) -> bytes:
        """Return the digest of the members' names; members are never removed."""
        count = len(self._members)
        if count not in self._digests:
            self._digests = {count: _digest("\n".join(member.name for member in self._members.values()).encode())}
        return self._digests[count]

    def _ask(self, name: str, values: Array) -> Handle:
        """Return the handle of the largest values (0 to 255) over all ranks."""
        return self._runtime.declare(f"{self._label}.{name}", values, np.empty_like(values), ReduceOp.MAX,
                                     Moment("", 0, self._steps, self._in_step), process_set=self._process_set)

    def _give(self, member: Any, present: bool) -> None:
        self._present[id(member.parameter)] = present
        member.given = self._number
        if not present:
            member.missing = self._number

    def _collect(self, errors: list[HvdliteError], deferrable: bool) -> None:
        """Reduce what the closed round has."""
        try:
            if self._is_early:
                self._reduce_last(deferrable)
            some_are_early = self._confirm(deferrable)
            if some_are_early:
                self._reduce_last(deferrable)
            rest = self._answer
            assert rest is not None
            if some_are_early and self._last is not None:
                rest = rest & (1 - self._last)
            if rest.any():
                self._reduce(rest, deferrable)
        except WaitDeferred:
            raise
        except HvdliteError as error:
            errors.append(error)
        except BaseException:
            if not self._is_confirming:
                self._end_round()  # it cannot be taken up again in the middle
            raise

    def _reduce_last(self, deferrable: bool) -> None:
        """Reduce the gradients that some rank had in the last round, once."""
        if not self._has_reduced_last:
            assert self._last is not None
            self._reduce(self._last, deferrable)
            self._has_reduced_last = True

    def _reduce(self, wanted: Array, deferrable: bool) -> None:
        """Let the function reduce the gradients of some members."""
        prefix = len(self._prefix)
        members = [(member.name[prefix:], member.parameter, self._present[key])
                   for (key, member), flag in zip(self._members.items(), wanted.tolist(), strict=True) if flag]
        for parameter, mark in self._reduce_round(members, functools.partial(self._confirm, deferrable)):
            self._mark_all([self._members[id(parameter)]], [mark])

    def _confirm(self, deferrable: bool) -> bool:
        """Wait until all ranks come to the reduction; return whether some have started it with the last round's gradients.

        Raises:
            MismatchError: when ranks have different members.
            WaitDeferred: when that is allowed; may be called again then.
        """
        assert self._asked is not None
        self._is_confirming = True
        count = len(self._members)
        answer = self._asked.wait(deferrable=deferrable)
        has_deferred, is_early = answer[count:count + 2].tolist()
        if self._answer is None:
            unlike = answer[count + 2:-2 * _DIGEST] != 255 - answer[-2 * _DIGEST:]  # then some rank has other bytes
            if unlike[:_DIGEST].any():
                raise MismatchError(f"ranks disagree about the members of '{self._label}', of which rank "
                                    f"{self._runtime.world.rank} has {count}. Give the optimizer the same "
                                    "parameters on all ranks (add_param_group and requires_grad too)")
            if is_early and unlike.any():
                raise MismatchError(f"ranks disagree about the last reduction of '{self._label}': on some ranks it was "
                                    "interrupted by an exception. Make a new optimizer on all ranks")
            self._note_behind(self._asked.behind)
            self._answer = answer[:count].copy()
        if has_deferred:
            self._entered = self._entered or self._ask("entered", np.empty(0, np.uint8))
            self._entered.wait(deferrable=deferrable)
        self._is_confirming = False
        return bool(is_early)


def _digest(values: bytes) -> bytes:
    return zlib.crc32(values).to_bytes(_DIGEST, "little")
