"""The bucket of a communication hook: all members of a round, for lossy schemes with state of their own."""

from __future__ import annotations

import itertools
from collections.abc import Set

import numpy as np
import torch

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.handle import Handle
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.training.gradients.bucket import DONE, FILLING, SENT, Bucket, SmallMembers
from hvdlite.training.gradients.framework import set_gradients
from hvdlite.training.gradients.gradient_set import GradientSet
from hvdlite.training.gradients.members import Member, Members, set_held, set_ready
from hvdlite_torch.arrays.tensors import empty_gradient
from hvdlite_torch.comm_hooks.exchange import CommHook, Exchange

_DIGEST = 4
"""Bytes of a digest."""


class HookBucket(Bucket[torch.Tensor]):
    """All members of one round, which a hook reduces when the round is closed.

    Ranks first exchange which gradients they have. That is also where they find out that they have other members or have
    made different numbers of rounds, and where a wait is deferred when ranks wait for each other in a circle. Once a rank
    has deferred a wait, it may have reported its gradients long before it comes to the reduction, which blocks. Then all
    ranks report in addition when they come to it, and that wait can be deferred too.

    Args:
        hook: averages the gradients.
        exchange: its collectives.
        together: all members, to be given together.
    """

    def __init__(self, hook: CommHook, exchange: Exchange, gradient_set: GradientSet[torch.Tensor],
                 members: Members[torch.Tensor], together: SmallMembers[torch.Tensor]) -> None:
        self.set = gradient_set
        self.state = FILLING
        self.holding = list(members)
        self._members = members
        for member in members:
            member.bucket = 0
        self._together = together
        self._hook = hook
        self._exchange = exchange
        self._given = set[Member[torch.Tensor]]()
        self._asked: Handle | None = None  # flags and digests of all ranks, see `send`
        self._entered: Handle | None = None  # done when all ranks come to the reduction

    def fill(self, member: Member[torch.Tensor], is_own: bool) -> None:
        self._given.add(member)

    def fill_small(self, keys: Set[int]) -> Set[int]:
        together = self._together
        if self._given or self.state is not FILLING or not together.small_keys <= keys:
            return frozenset()
        parameters = [member.parameter for member in together.small]
        gradients = list(map(self.set.framework.get, parameters))
        if any(gradient is None for gradient in gradients):
            return frozenset()
        set_gradients(self.set.framework, parameters, itertools.repeat(None))
        set_held(together.small, gradients)
        set_ready(together.small)
        self._given.update(together.small)
        return together.small_keys

    def leave_out(self, member: Member[torch.Tensor]) -> None:
        """It holds what it has."""

    def send(self) -> None:
        present = np.fromiter(map(self._given.__contains__, self.holding), np.uint8, len(self.holding))
        digest = np.frombuffer(self._together.digest(self.set.framework), np.uint8)
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
        return owner.runtime.gradients.enqueue_gradient(f"{owner.label}.{name}", values, np.empty_like(values), ReduceOp.MAX,
                                              Moment("", 0, owner.step, owner.in_step, owner.sharded),
                                                       process_set=owner.process_set_id)

    def _wait_for_all(self, deferrable: bool) -> Array:
        """Wait until all ranks come to the reduction; return for each member whether some rank has a gradient.

        Raises:
            MismatchError: when ranks have different members.
            WaitDeferred: when that is allowed; may be called again then.
        """
        owner, count = self.set, len(self.holding)
        answer: Array = self._asked.wait(deferrable=deferrable)
        if (answer[-2 * _DIGEST:-_DIGEST] != 255 - answer[-_DIGEST:]).any():  # some rank has other bytes
            raise MismatchError(f"ranks disagree about the members of '{owner.label}', of which rank "
                                f"{owner.runtime.world.rank} has {count}. Give the optimizer the same parameters, of the "
                                "same shapes, on all ranks (add_param_group and requires_grad too)")
        self.ranks_in_step = self._asked.ranks_in_step
        if answer[count]:
            self._entered = self._entered or self._ask("entered", np.empty(0, np.uint8))
            self._entered.wait(deferrable=deferrable)
        return answer[:count]

    @torch.no_grad()
    def _reduce(self, wanted: Array) -> None:
        """Let the hook average the gradients of some members, where zeros stand for what this rank does not have."""
        prefix, exchange = len(self._members.prefix), self._exchange
        members = [member for member, flag in zip(self.holding, wanted.tolist(), strict=True) if flag]
        gradients = [empty_gradient(member.parameter).zero_() if member not in self._given or member.held is None else
                     member.held if member.held.layout is torch.strided else member.held.to_dense() for member in members]
        exchange.parameters = [member.parameter for member in members]
        exchange.active = len(self._asked.contributors)
        if not getattr(self._hook, "is_idempotent", False):  # it may have a state, such as residuals, that it changes now
            api.worlds().step_begins()
        self._hook.reduce([(member.name[prefix:], gradient) for member, gradient in zip(members, gradients, strict=True)],
                          exchange)
        exchange.parameters = ()
        self.reduced, self.gradients = members, gradients
        self.partial = [(member, self._asked.contributors) for member in self.holding if member in self._given]
