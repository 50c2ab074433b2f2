"""Rounds that a communication hook reduces as a whole: for lossy schemes with state of their own."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import Handle, WaitDeferred
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.training.framework import Parameter
from hvdlite.training.gradient_set import GradientSet
from hvdlite.training.members import Member
from hvdlite.training.round import Round, Rounds

_DIGEST = 4
"""Bytes of a digest."""
ReduceRound = Callable[[Sequence[tuple[str, Parameter, bool]], Callable[[], object]], Sequence[tuple[Parameter, Any]]]
"""Reduce the gradients of (name, parameter, has one here), which some rank has; return the parameters and their marks.

Names are those that `add` was given. The function calls the second argument before it waits for another rank. `WaitDeferred`
can come out of that, and out of the function; then the function is called again.
"""


class HookRounds(Rounds[Parameter], Generic[Parameter]):
    """Everything is reduced when the round is closed, by `reduce_round`.

    Ranks tell each other first which gradients they have. That is also where they find out that they have other members or
    have made different numbers of rounds, and where a wait is deferred when ranks wait for each other in a circle. Once a
    rank has deferred a wait, it may have told what it has long before it comes to the reduction, which blocks. Then all
    ranks say in addition when they come to it, and that wait can be deferred too.

    A rank that has exactly the gradients that some rank had in the last round does not wait for the answer before it starts
    to reduce these: the function starts its first collective, and waits for the answer before it waits for the result. When
    some rank has started in this way, all ranks reduce the last round's gradients first, and then what else there is.

    Args:
        reduce_round: the function.
        is_repeatable: whether it can be called again with the same gradients after `WaitDeferred` came out of its second
            argument; otherwise it is called only when the answer is there.

    Attributes:
        answer: for each member whether some rank has a gradient in the last round, once all ranks have told.
    """

    by_bucket = False
    bucket_views = None

    def __init__(self, reduce_round: ReduceRound[Parameter], *, is_repeatable: bool = False) -> None:
        self.reduce_round, self.is_repeatable = reduce_round, is_repeatable
        self.answer: Array | None = None
        self._digests: dict[int, bytes] = {}  # of the members' names, by how many they are

    def begin(self, gradient_set: GradientSet[Parameter]) -> Round[Parameter]:
        joins, last = gradient_set.joins, self.answer
        self.answer = None
        begun = HookRound(gradient_set, self)
        begun.last = last if joins == gradient_set.joins else None
        return begun

    def forget(self) -> None:
        pass

    def names_digest(self, gradient_set: GradientSet[Parameter]) -> bytes:
        """Return the digest of the members' names; members are never removed."""
        count = len(gradient_set.members)
        if count not in self._digests:
            self._digests = {count: _digest("\n".join(member.name for member in gradient_set.members).encode())}
        return self._digests[count]


class HookRound(Round[Parameter]):
    """One of them.

    Attributes:
        last: for each member whether some rank had a gradient in the last round; None: unknown.
    """

    moves_gradients = False

    def __init__(self, gradient_set: GradientSet[Parameter], rounds: HookRounds[Parameter]) -> None:
        super().__init__(gradient_set)
        self.last: Array | None = None
        self._rounds = rounds
        self._present: dict[int, bool] = {}  # members that were given, by identity: whether they have a gradient
        self._asked: Handle | None = None  # flags and digests of all ranks, see `close`
        self._entered: Handle | None = None  # done when all ranks come to the reduction
        self._is_early = False  # this rank has started, or will start, to reduce the last round's gradients
        self._has_reduced_last = False  # the last round's gradients are reduced
        self._is_confirming = False  # an exception that comes now leaves nothing half done

    def give(self, member: Member[Parameter], present: bool) -> None:
        if present and self._set.gradients.is_again(member):
            member.again = self.round_id
            self.has_again = True
        self._present[id(member.parameter)] = present
        member.given = self.round_id
        if not present:
            member.missing = self.round_id

    def close(self) -> None:
        owner = self._set
        present = np.fromiter(map(self._present.__getitem__, owner.members.by_key), np.uint8, len(owner.members))
        if self.last is not None and len(self.last) != len(present):
            self.last = None  # there are more members now
        has_deferred = owner.runtime.has_deferred
        # Where reductions are idempotent, gradients may change while a wait is deferred.
        self._is_early = (self._rounds.is_repeatable and not owner.gradients.is_idempotent and not has_deferred
                          and self.last is not None
                          and bool(present.any()) and np.array_equal(present, self.last))
        of_last = _digest(b"" if self.last is None else self.last.tobytes())
        digests = np.frombuffer(self._rounds.names_digest(owner) + of_last, np.uint8)
        self._asked = self._ask("present", np.concatenate(
            [present, np.array([has_deferred, self._is_early], np.uint8), digests, 255 - digests]))
        super().close()

    def collect(self, errors: list[HvdliteError], deferrable: bool) -> None:
        """Reduce what the closed round has."""
        self.reduced = []
        try:
            if self._is_early:
                self._reduce_last(deferrable)
            some_are_early = self._confirm(deferrable)
            if some_are_early:
                self._reduce_last(deferrable)
            rest = self._rounds.answer
            assert rest is not None
            if some_are_early and self.last is not None:
                rest = rest & (1 - self.last)
            if rest.any():
                self._reduce(rest, deferrable)
            if self.has_again:
                assert self._asked is not None
                self._check_again(next(member for member in self._set.members if member.again == self.round_id),
                                  self._asked.contributors)
        except WaitDeferred:
            raise
        except HvdliteError as error:
            errors.append(error)
        except BaseException:
            self.is_over = not self._is_confirming  # it cannot be taken up again in the middle
            raise

    def _ask(self, name: str, values: Array) -> Handle:
        """Return the handle of the largest values (0 to 255) over all ranks."""
        owner = self._set
        return owner.runtime.enqueue_gradient(f"{owner.label}.{name}", values, np.empty_like(values), ReduceOp.MAX,
                                              Moment("", 0, owner.step, owner.in_step), process_set=owner.process_set_id)

    def _reduce_last(self, deferrable: bool) -> None:
        """Reduce the gradients that some rank had in the last round, once."""
        if not self._has_reduced_last:
            assert self.last is not None
            self._reduce(self.last, deferrable)
            self._has_reduced_last = True

    def _reduce(self, wanted: Array, deferrable: bool) -> None:
        """Let the function reduce the gradients of some members."""
        by_key, prefix = self._set.members.by_key, len(self._set.members.prefix)
        members = [(member.name[prefix:], member.parameter, self._present[key])
                   for (key, member), flag in zip(by_key.items(), wanted.tolist(), strict=True) if flag]
        for parameter, mark in self._rounds.reduce_round(members, functools.partial(self._confirm, deferrable)):
            self._mark_all([by_key[id(parameter)]], [mark])

    def _confirm(self, deferrable: bool) -> bool:
        """Wait until all ranks come to the reduction; return whether some have started it with the last round's gradients.

        Raises:
            MismatchError: when ranks have different members.
            WaitDeferred: when that is allowed; may be called again then.
        """
        assert self._asked is not None
        self._is_confirming = True
        owner, count = self._set, len(self._set.members)
        answer = self._asked.wait(deferrable=deferrable)
        has_deferred, is_early = answer[count:count + 2].tolist()
        if self._rounds.answer is None:
            unlike = answer[count + 2:-2 * _DIGEST] != 255 - answer[-2 * _DIGEST:]  # then some rank has other bytes
            if unlike[:_DIGEST].any():
                raise MismatchError(f"ranks disagree about the members of '{owner.label}', of which rank "
                                    f"{owner.rank} has {count}. Give the optimizer the same "
                                    "parameters on all ranks (add_param_group and requires_grad too)")
            if is_early and unlike.any():
                raise MismatchError(f"ranks disagree about the last reduction of '{owner.label}': on some ranks it was "
                                    "interrupted by an exception. Make a new optimizer on all ranks")
            self.behind.update(self._asked.behind)
            self._rounds.answer = answer[:count].copy()
        if has_deferred:
            self._entered = self._entered or self._ask("entered", np.empty(0, np.uint8))
            self._entered.wait(deferrable=deferrable)
        self._is_confirming = False
        return bool(is_early)


def _digest(values: bytes) -> bytes:
    return zlib.crc32(values).to_bytes(_DIGEST, "little")
