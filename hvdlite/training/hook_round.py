"""Rounds that a communication hook reduces as a whole: for lossy schemes with state of their own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import Handle
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.training.framework import Parameter
from hvdlite.training.gradient_set import GradientSet
from hvdlite.training.members import Member
from hvdlite.training.round import Round, Rounds

_DIGEST = 4
"""Bytes of a digest."""
ReduceRound = Callable[[Sequence[tuple[str, Parameter, bool]], int], Sequence[tuple[Parameter, Any]]]
"""Reduce the gradients of (name, parameter, has one here), which some rank has; return the parameters and their marks.

Names are those that `add` was given. The second argument says how many ranks take part: those that have not joined.
"""


class HookRounds(Rounds[Parameter], Generic[Parameter]):
    """Everything is reduced when the round is closed, by `reduce_round`.

    Ranks tell each other first which gradients they have. That is also where they find out that they have other members or
    have made different numbers of rounds, and where a wait is deferred when ranks wait for each other in a circle. Once a
    rank has deferred a wait, it may have told what it has long before it comes to the reduction, which blocks. Then all
    ranks say in addition when they come to it, and that wait can be deferred too.

    Args:
        reduce_round: the function.
    """

    by_bucket = False
    bucket_views = None

    def __init__(self, reduce_round: ReduceRound[Parameter]) -> None:
        self.reduce_round = reduce_round
        self._digests: dict[int, bytes] = {}  # of the members' names, by how many they are

    def begin(self, gradient_set: GradientSet[Parameter]) -> Round[Parameter]:
        return HookRound(gradient_set, self)

    def forget(self) -> None:
        pass

    def names_digest(self, gradient_set: GradientSet[Parameter]) -> bytes:
        """Return the digest of the members' names; members are never removed."""
        count = len(gradient_set.members)
        if count not in self._digests:
            names = "\n".join(member.name for member in gradient_set.members)
            self._digests = {count: zlib.crc32(names.encode()).to_bytes(_DIGEST, "little")}
        return self._digests[count]


class HookRound(Round[Parameter]):
    """One of them."""

    moves_gradients = False

    def __init__(self, gradient_set: GradientSet[Parameter], rounds: HookRounds[Parameter]) -> None:
        super().__init__(gradient_set)
        self._rounds = rounds
        self._present: dict[int, bool] = {}  # members that were given, by identity: whether they have a gradient
        self._asked: Handle | None = None  # flags and digests of all ranks, see `close`
        self._entered: Handle | None = None  # done when all ranks come to the reduction

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
        digest = np.frombuffer(self._rounds.names_digest(owner), np.uint8)
        has_deferred = np.array([owner.runtime.has_deferred], np.uint8)
        self._asked = self._ask("present", np.concatenate([present, has_deferred, digest, 255 - digest]))
        super().close()

    def collect(self, errors: list[HvdliteError], deferrable: bool) -> None:
        """Reduce what the closed round has."""
        self.reduced = []
        has_begun = False
        try:
            wanted = self._wait_for_all(deferrable)
            has_begun = True
            if wanted.any():
                self._reduce(wanted)
        except HvdliteError as error:
            errors.append(error)
        except BaseException:
            self.is_over = has_begun  # it cannot be taken up again in the middle
            raise

    def _ask(self, name: str, values: Array) -> Handle:
        """Return the handle of the largest values (0 to 255) over all ranks."""
        owner = self._set
        return owner.runtime.enqueue_gradient(f"{owner.label}.{name}", values, np.empty_like(values), ReduceOp.MAX,
                                              Moment("", 0, owner.step, owner.in_step), process_set=owner.process_set_id)

    def _wait_for_all(self, deferrable: bool) -> Array:
        """Wait until all ranks come to the reduction; return for each member whether some rank has a gradient.

        Raises:
            MismatchError: when ranks have different members.
            WaitDeferred: when that is allowed; may be called again then.
        """
        assert self._asked is not None
        owner, count = self._set, len(self._set.members)
        answer: Array = self._asked.wait(deferrable=deferrable)
        if (answer[-2 * _DIGEST:-_DIGEST] != 255 - answer[-_DIGEST:]).any():  # some rank has other bytes
            raise MismatchError(f"ranks disagree about the members of '{owner.label}', of which rank {owner.rank} has "
                                f"{count}. Give the optimizer the same parameters on all ranks (add_param_group and "
                                "requires_grad too)")
        self.behind.update(self._asked.behind)
        if answer[count]:
            self._entered = self._entered or self._ask("entered", np.empty(0, np.uint8))
            self._entered.wait(deferrable=deferrable)
        return answer[:count]

    def _reduce(self, wanted: Array) -> None:
        """Let the function reduce the gradients of some members."""
        assert self._asked is not None
        by_key, prefix = self._set.members.by_key, len(self._set.members.prefix)
        members = [(member.name[prefix:], member.parameter, self._present[key])
                   for (key, member), flag in zip(by_key.items(), wanted.tolist(), strict=True) if flag]
        for parameter, mark in self._rounds.reduce_round(members, len(self._asked.contributors)):
            self._mark_all([by_key[id(parameter)]], [mark])
        if self.has_again:
            again = next(member for member in self._set.members if member.again == self.round_id)
            self._check_again(again, self._asked.contributors)
