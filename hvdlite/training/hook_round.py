"""Rounds that a communication hook reduces as a whole: for lossy schemes with state of their own."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import Handle, WaitDeferred
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.training.gradients.bucket import DONE, FILLING, SENT, Bucket
from hvdlite.training.gradients.framework import Gradient, Parameter
from hvdlite.training.gradients.gradient_set import GradientSet
from hvdlite.training.gradients.members import Member, Members

_DIGEST = 4
"""Bytes of a digest."""
ReduceRound = Callable[[Sequence[tuple[str, Parameter, Gradient | None]], Callable[[], object]], Sequence[Gradient]]
"""Reduce the gradients of (name, parameter, gradient; None: none here), which some rank has; return the reduced ones.

Names are those that `add` was given. The function calls the second argument before it waits for another rank. `WaitDeferred`
can come out of that, and out of the function; then the function is called again.
"""


class HookRounds(Generic[Parameter]):
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

    def __init__(self, reduce_round: ReduceRound[Parameter], *, is_repeatable: bool = False) -> None:
        self.reduce_round, self.is_repeatable = reduce_round, is_repeatable
        self.answer: Array | None = None
        self._digests: dict[int, bytes] = {}  # of the members' names, by how many they are
        self._joins = 0

    def begin(self, gradient_set: GradientSet[Parameter], members: Members[Parameter]) -> Bucket[Parameter]:
        """Return the bucket of all members for a new round; the one before is over."""
        last = self.answer if self._joins == gradient_set.joins else None
        self.answer, self._joins = None, gradient_set.joins
        return HookBucket(gradient_set, members, self, last)

    def names_digest(self, members: Members[Parameter]) -> bytes:
        """Return the digest of the members' names; members are never removed."""
        count = len(members)
        if count not in self._digests:
            self._digests = {count: _digest("\n".join(member.name for member in members).encode())}
        return self._digests[count]


class HookBucket(Bucket[Parameter]):
    """All members of one round, which is reduced when the round is closed.

    Args:
        last: for each member whether some rank had a gradient in the last round; None: unknown.
    """

    def __init__(self, gradient_set: GradientSet[Parameter], members: Members[Parameter], rounds: HookRounds[Parameter],
                 last: Array | None) -> None:
        self.set = gradient_set
        self.state = FILLING
        self.last = last
        self._members = members
        for member in members:
            member.bucket = 0
        self._rounds = rounds
        self._is_given: dict[int, bool] = {}  # members, by identity: whether they have a gradient
        self._asked: Handle | None = None  # flags and digests of all ranks, see `send`
        self._entered: Handle | None = None  # done when all ranks come to the reduction
        self._is_early = False  # this rank has started, or will start, to reduce the last round's gradients
        self._has_reduced_last = False  # the last round's gradients are reduced
        self._is_confirming = False  # an exception that comes now leaves nothing half done

    @property
    def holding(self) -> Sequence[Member[Parameter]]:
        return list(self._members)

    def fill(self, member: Member[Parameter], is_own: bool) -> None:
        self._is_given[id(member.parameter)] = True

    def leave_out(self, member: Member[Parameter]) -> None:
        self._is_given[id(member.parameter)] = False

    def send(self) -> None:
        owner, members = self.set, self._members
        present = np.fromiter(map(self._is_given.__getitem__, members.by_key), np.uint8, len(members))
        if self.last is not None and len(self.last) != len(present):
            self.last = None  # there are more members now
        has_deferred = owner.runtime.has_deferred
        # Where reductions are idempotent, gradients may change while a wait is deferred.
        self._is_early = (self._rounds.is_repeatable and not members.is_idempotent and not has_deferred
                          and self.last is not None
                          and bool(present.any()) and np.array_equal(present, self.last))
        of_last = _digest(b"" if self.last is None else self.last.tobytes())
        digests = np.frombuffer(self._rounds.names_digest(members) + of_last, np.uint8)
        self._asked = self._ask("present", np.concatenate(
            [present, np.array([has_deferred, self._is_early], np.uint8), digests, 255 - digests]))
        self.state = SENT

    def finish(self, deferrable: bool) -> None:
        """Reduce what the closed round has."""
        if self.state is DONE:
            return
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
            assert self._asked is not None
            self.partial = [(member, self._asked.contributors) for member in self._members
                            if self._is_given[id(member.parameter)]]
        except WaitDeferred:
            raise
        except HvdliteError as error:
            self.errors = [error]
        except BaseException:
            self.is_over = not self._is_confirming  # it cannot be taken up again in the middle
            if self.is_over:
                self._end()
            raise
        self._end()

    def _end(self) -> None:
        reduced = set(self.reduced)
        self.rest = [member for member in self._members if member not in reduced]
        self.state = DONE

    def _ask(self, name: str, values: Array) -> Handle:
        """Return the handle of the largest values (0 to 255) over all ranks."""
        owner = self.set
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
        prefix = len(self._members.prefix)
        members = [member for member, flag in zip(self._members, wanted.tolist(), strict=True) if flag]
        gradients = self._rounds.reduce_round(
            [(member.name[prefix:], member.parameter, member.held if self._is_given[id(member.parameter)] else None)
             for member in members], functools.partial(self._confirm, deferrable))
        self.reduced, self.gradients = [*self.reduced, *members], [*self.gradients, *gradients]

    def _confirm(self, deferrable: bool) -> bool:
        """Wait until all ranks come to the reduction; return whether some have started it with the last round's gradients.

        Raises:
            MismatchError: when ranks have different members.
            WaitDeferred: when that is allowed; may be called again then.
        """
        assert self._asked is not None
        self._is_confirming = True
        owner, count = self.set, len(self._members)
        answer = self._asked.wait(deferrable=deferrable)
        has_deferred, is_early = answer[count:count + 2].tolist()
        if self._rounds.answer is None:
            unlike = answer[count + 2:-2 * _DIGEST] != 255 - answer[-2 * _DIGEST:]  # then some rank has other bytes
            if unlike[:_DIGEST].any():
                raise MismatchError(f"ranks disagree about the members of '{owner.label}', of which rank "
                                    f"{owner.runtime.world.rank} has {count}. Give the optimizer the same "
                                    "parameters on all ranks (add_param_group and requires_grad too)")
            if is_early and unlike.any():
                raise MismatchError(f"ranks disagree about the last reduction of '{owner.label}': on some ranks it was "
                                    "interrupted by an exception. Make a new optimizer on all ranks")
            self.behind = self._asked.behind
            self._rounds.answer = answer[:count].copy()
        if has_deferred:
            self._entered = self._entered or self._ask("entered", np.empty(0, np.uint8))
            self._entered.wait(deferrable=deferrable)
        self._is_confirming = False
        return bool(is_early)


def _digest(values: bytes) -> bytes:
    return zlib.crc32(values).to_bytes(_DIGEST, "little")
