"""The arguments of a communication hook: the gradients of a round, and collectives over the ranks that share them.

`HookBucket` is the bucket of a communication hook: all members of a round, for lossy schemes with state of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import HvdliteError, MismatchError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.handle import Handle
from hvdlite.runtime.gradient_sets import Moment
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.bucket import DONE, FILLING, SENT, Bucket
from hvdlite.training.gradients.gradient_set import GradientSet
from hvdlite.training.gradients.members import Member, Members
from hvdlite_torch.arrays import cuda
from hvdlite_torch.arrays.tensors import as_runtime_array, as_tensor, contiguous, empty_gradient

Gradients = Sequence[tuple[str, torch.Tensor]]
"""Names, equal on all ranks, and dense gradients to be overwritten with their averages over all ranks."""


class CommHook(Protocol):
    """The interface of `comm_hook`.

    A hook can have an attribute `is_idempotent`: averaging averages again leaves them as they are, so parameters can have
    several backward passes before a step. A second one raises with other hooks.
    """

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients over all ranks, in place; called on all ranks with the same names in the same order."""


class Exchange:
    """Collectives over the ranks that share gradients.

    Attributes:
        size: how many ranks these are.
        rank: this rank's number in the job.
        active: how many of them take part in this round; the others have joined.
        joins: changes when all ranks have joined, and when a world of an elastic job begins. Until then, ranks that joined
            early or were not there missed calls of `reduce`.
        parameters: of the gradients that are being reduced, in their order.
    """

    _runtime: Runtime  # of this world
    size: int
    rank: int
    active: int

    def __init__(self) -> None:
        self.parameters: Sequence[torch.Tensor] = ()
        self._joins_before = 0  # this world
        self._label, self._process_set = "", GLOBAL_PROCESS_SET_ID

    def attach(self, runtime: Runtime, label: str, process_set: int) -> None:
        """Use the collectives of a runtime from now on."""
        self._runtime, self._label, self._process_set = runtime, label, process_set
        self.size, self.rank = len(runtime.members(process_set)), runtime.world.rank

    def detach(self) -> None:
        """The runtime has ended, maybe in the middle of a round."""
        self._joins_before = self.joins + 1
        del self._runtime
        self.parameters = ()

    @property
    def joins(self) -> int:
        return self._joins_before + self._runtime.joins

    def average(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Average tensors in place, as one group."""
        self.start_average(name, tensors)()

    def start_average(self, name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start to average tensors in place, as one group; return a function that waits until they are averaged."""
        return self._start_reduction(name, tensors, ReduceOp.AVERAGE)

    def largest(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the largest values of a tensor over all ranks, element by element."""
        result = tensor.clone()
        self._start_reduction(name, [result], ReduceOp.MAX)()
        return result

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors, concatenated along the first dimension."""
        devices = self._runtime.devices
        source = cuda.to_transportable(contiguous(tensor, name), devices, Collective.ALLGATHER)
        handle = self._runtime.allgather(f"{self._label}.{name}", as_runtime_array(source, name, devices),
                                         process_set=self._process_set)
        return as_tensor(cuda.wait(handle)).to(tensor.device)

    def _start_reduction(self, name: str, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Callable[[], None]:
        if not tensors:
            return _nothing
        devices = self._runtime.devices
        dense = [cuda.to_transportable(contiguous(tensor, name), devices, Collective.ALLREDUCE, op) for tensor in tensors]
        arrays = [as_runtime_array(tensor, name, devices) for tensor in dense]
        handle = self._runtime.grouped_allreduce(f"{self._label}.{name}", arrays, arrays, op, process_set=self._process_set)

        def wait() -> None:
            cuda.wait(handle)
            for tensor, result in zip(tensors, dense, strict=True):
                if tensor.data_ptr() != result.data_ptr():
                    tensor.copy_(result)
        return wait


class AllReduce:
    """Plain averaging, as without a hook, but after backward."""

    is_idempotent = True

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients."""
        exchange.average("gradients", [gradient for _, gradient in gradients])


def _nothing() -> None:
    pass


def check_hook(hook: Any) -> None:
    """Raise `ValueError` unless this can be a `comm_hook`."""
    if isinstance(hook, type):
        raise ValueError(f"comm_hook takes an instance with state of its own, such as {hook.__name__}(), not the class")
    if not callable(getattr(hook, "reduce", None)):
        raise ValueError(
            f"comm_hook takes an object with a method reduce(gradients, exchange), such as comm_hooks.PowerSGD(), not "
            f"{hook!r}. A function (state, bucket) that DDP's register_comm_hook takes goes through "
            "comm_hooks.DDPHook(state, function)")


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
    """

    def __init__(self, hook: CommHook, exchange: Exchange, gradient_set: GradientSet[torch.Tensor],
                 members: Members[torch.Tensor]) -> None:
        self.set = gradient_set
        self.state = FILLING
        self.holding = list(members)
        self._members = members
        for member in members:
            member.bucket = 0
        self._hook = hook
        self._exchange = exchange
        self._given = set[Member[torch.Tensor]]()
        self._asked: Handle | None = None  # flags and digests of all ranks, see `send`
        self._entered: Handle | None = None  # done when all ranks come to the reduction

    def fill(self, member: Member[torch.Tensor], is_own: bool) -> None:
        self._given.add(member)

    def leave_out(self, member: Member[torch.Tensor]) -> None:
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
        return owner.runtime.gradients.enqueue_gradient(f"{owner.label}.{name}", values, np.empty_like(values), ReduceOp.MAX,
                                              Moment("", 0, owner.step, owner.in_step), process_set=owner.process_set_id)

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
                                f"{owner.runtime.world.rank} has {count}. Give the optimizer the same parameters on "
                                "all ranks (add_param_group and requires_grad too)")
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
