"""The bucket of a communication hook: all members of a round, for lossy schemes with state of their own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import Handle
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.training.gradients.bucket import DONE, FILLING, SENT, Bucket
from hvdlite.training.gradients.framework import Gradient, Parameter
from hvdlite.training.gradients.gradient_set import GradientSet
from hvdlite.training.gradients.members import Member, Members

_DIGEST = 4
"""Bytes of a digest."""
ReduceRound = Callable[[Sequence[tuple[str, Parameter, Gradient | None]], int], Sequence[Gradient]]
"""Reduce the gradients of (name, parameter, gradient; None: none here), which some rank has; return the reduced ones.

Names are those that `add` was given. The second argument says how many ranks take part: those that have not joined.
"""


class HookBucket(Bucket[Parameter]):
    """All members of one round, which `reduce_round` reduces when the round is closed.

    Ranks tell each other first which gradients they have. That is also where they find out that they have other members or
    have made different numbers of rounds, and where a wait is deferred when ranks wait for each other in a circle. Once a
    rank has deferred a wait, it may have told what it has long before it comes to the reduction, which blocks. Then all
    ranks say in addition when they come to it, and that wait can be deferred too.

    Args:
        reduce_round: the function.
    """

    def __init__(self, reduce_round: ReduceRound[Parameter], gradient_set: GradientSet[Parameter],
                 members: Members[Parameter]) -> None:
        self.set = gradient_set
        self.state = FILLING
        self.holding = list(members)
        self._members = members
        for member in members:
            member.bucket = 0
        self._reduce_round = reduce_round
        self._given = set[Member[Parameter]]()
        self._asked: Handle | None = None  # flags and digests of all ranks, see `send`
        self._entered: Handle | None = None  # done when all ranks come to the reduction

    def fill(self, member: Member[Parameter], is_own: bool) -> None:
        self._given.add(member)

    def leave_out(self, member: Member[Parameter]) -> None:
        """It holds what it has."""

    def send(self) -> None:
        present = np.fromiter(map(self._given.__contains__, self.holding), np.uint8, len(self.holding))
        names = "\n".join(member.name for member in self.holding)
        digest = np.frombuffer(zlib.crc32(names.encode()).to_bytes(_DIGEST, "little"), np.uint8)
        has_deferred = np.array([self.set.runtime.has_deferred], np.uint8)
        self._asked = self._ask("present", np.concatenate([present, has_deferred, digest, 255 - digest]))
        self.state = SENT

    def finish(self, deferrable: bool) -> None:
        """Reduce what the closed round has."""
        if self.state is DONE:
            return
        has_begun = False
        try:
            wanted = self._wait_for_all(deferrable)
            has_begun = True
            if wanted.any():
                self._reduce(wanted)
        except HvdliteError as error:
            self.errors = [error]
        except BaseException:
            self.is_over = has_begun  # it cannot be taken up again in the middle
            if self.is_over:
                self._end()
            raise
        self._end()

    def _end(self) -> None:
        reduced = set(self.reduced)
        self.rest = [member for member in self.holding if member not in reduced]
        self.state = DONE

    def _ask(self, name: str, values: Array) -> Handle:
        """Return the handle of the largest values (0 to 255) over all ranks."""
        owner = self.set
        return owner.runtime.enqueue_gradient(f"{owner.label}.{name}", values, np.empty_like(values), ReduceOp.MAX,
                                              Moment("", 0, owner.step, owner.in_step), process_set=owner.process_set_id)

    def _wait_for_all(self, deferrable: bool) -> Array:
        """Wait until all ranks come to the reduction; return for each member whether some rank has a gradient.

        Raises:
            MismatchError: when ranks have different members.
            WaitDeferred: when that is allowed; may be called again then.
        """
        assert self._asked is not None
        owner, count = self.set, len(self.holding)
        answer: Array = self._asked.wait(deferrable=deferrable)
        if (answer[-2 * _DIGEST:-_DIGEST] != 255 - answer[-_DIGEST:]).any():  # some rank has other bytes
            raise MismatchError(f"ranks disagree about the members of '{owner.label}', of which rank "
                                f"{owner.runtime.world.rank} has {count}. Give the optimizer the same parameters on "
                                "all ranks (add_param_group and requires_grad too)")
        self.behind = self._asked.behind
        if answer[count]:
            self._entered = self._entered or self._ask("entered", np.empty(0, np.uint8))
            self._entered.wait(deferrable=deferrable)
        return answer[:count]

    def _reduce(self, wanted: Array) -> None:
        """Let the function reduce the gradients of some members."""
        assert self._asked is not None
        prefix, given = len(self._members.prefix), self._given
        members = [member for member, flag in zip(self.holding, wanted.tolist(), strict=True) if flag]
        self.gradients = self._reduce_round(
            [(member.name[prefix:], member.parameter, member.held if member in given else None) for member in members],
            len(self._asked.contributors))
        self.reduced = members
        self.partial = [(member, self._asked.contributors) for member in self.holding if member in given]
