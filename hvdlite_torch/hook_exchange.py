"""The arguments of a communication hook: the gradients of a round, and collectives over the ranks that share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hvdlite.core.errors import HvdliteError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.handle import Handle, Handles
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch import cuda
from hvdlite_torch.tensors import as_runtime_array, as_tensor, contiguous

Gradients = Sequence[tuple[str, torch.Tensor]]
"""Names, equal on all ranks, and dense gradients to be overwritten with their averages over all ranks."""


class CommHook(Protocol):
    """The interface of `comm_hook`.

    A hook can have one of two attributes:
    - `is_idempotent`: averaging averages again leaves them as they are, so parameters can have several backward passes
      before a step. A second one raises with other hooks.
    - `is_repeatable`: `reduce` may be called a second time with the same gradients because an exception left its first
      collective call. Until that call returns, `reduce` changes neither state nor gradients, and the tensors that it passes
      to that call are its own and new. The collectives of such a hook start without waiting until all ranks have said which
      gradients they have.
    """

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients over all ranks, in place; called on all ranks with the same names in the same order."""


class Exchange:
    """Collectives over the ranks that share gradients.

    Attributes:
        size: how many ranks these are.
        rank: this rank's number in the job.
        joins: changes when all ranks have joined, and when a world of an elastic job begins. Until then, ranks that joined
            early or were not there missed calls of `reduce`.
        parameters: of the gradients that are being reduced, in their order.
    """

    _runtime: Runtime  # of this world
    size: int
    rank: int

    def __init__(self) -> None:
        self.parameters: Sequence[torch.Tensor] = ()
        self._joins_before = 0  # this world
        self._label, self._process_set = "", GLOBAL_PROCESS_SET_ID
        self._confirm: Callable[[], object] = _nothing
        self._is_confirming = False
        # By name: collectives that were started and not waited for, and the tensors that they write to.
        self._started: dict[str, tuple[Handle | Handles, Sequence[torch.Tensor]]] = {}

    def attach(self, runtime: Runtime, label: str, process_set: int) -> None:
        """Use the collectives of a runtime from now on."""
        self._runtime, self._label, self._process_set = runtime, label, process_set
        self.size, self.rank = len(runtime.members(process_set)), runtime.world.rank

    def detach(self) -> None:
        """The runtime has ended, maybe in the middle of a round."""
        self._joins_before = self.joins + 1
        del self._runtime
        self.end()
        self._is_confirming = False
        self._started.clear()

    @property
    def joins(self) -> int:
        return self._joins_before + self._runtime.joins

    def average(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Average tensors in place, as one group."""
        self.start_average(name, tensors)()

    def start_average(self, name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start to average tensors in place, as one group; return a function that waits until they are averaged.

        In an `is_repeatable` hook, wait for the first collective before you start another.
        """
        return self._start_reduction(name, tensors, ReduceOp.AVERAGE)

    def largest(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the largest values of a tensor over all ranks, element by element."""
        result = tensor.clone()
        self._start_reduction(name, [result], ReduceOp.MAX)()
        return result

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors, concatenated along the first dimension."""
        if name not in self._started:
            devices = self._runtime.devices
            source = cuda.to_transportable(contiguous(tensor, name), devices, Collective.ALLGATHER)
            self._started[name] = self._runtime.allgather(f"{self._label}.{name}", as_runtime_array(source, name, devices),
                                                          process_set=self._process_set), ()
        self.confirm()
        handle, _ = self._started.pop(name)
        return as_tensor(cuda.wait(handle)).to(tensor.device)

    def confirm(self) -> None:
        """Wait until all ranks are known to take part with these gradients; the first collective waits for it too."""
        self._is_confirming = True
        try:
            self._confirm()
        except HvdliteError:  # the round is over
            self._is_confirming = False
            raise
        self._is_confirming = False

    def begin(self, parameters: Sequence[torch.Tensor], confirm: Callable[[], object]) -> None:
        """A hook is about to be called; `confirm` is called before anything is waited for.

        A hook that is called again, because an exception left `confirm`, finds the collective that it had started.
        """
        if not self._is_confirming:
            self._started.clear()
        self.parameters, self._confirm = parameters, confirm

    def end(self) -> None:
        """The hook has returned."""
        self.parameters, self._confirm = (), _nothing

    def _start_reduction(self, name: str, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Callable[[], None]:
        if tensors and name not in self._started:
            devices = self._runtime.devices
            dense = [cuda.to_transportable(contiguous(tensor, name), devices, Collective.ALLREDUCE,
                                           op) for tensor in tensors]
            arrays = [as_runtime_array(tensor, name, devices) for tensor in dense]
            handle = self._runtime.grouped_allreduce(f"{self._label}.{name}", arrays, arrays, op,
                                                     process_set=self._process_set)
            self._started[name] = handle, dense

        def wait() -> None:
            self.confirm()
            if not tensors:
                return
            handle, dense = self._started.pop(name)
            cuda.wait(handle)
            for tensor, result in zip(tensors, dense, strict=True):
                if tensor.data_ptr() != result.data_ptr():
                    tensor.copy_(result)
        return wait


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


def reduce_round(hook: CommHook, exchange: Exchange, members: Sequence[tuple[str, torch.Tensor, torch.Tensor | None]],
                 confirm: Callable[[], object]) -> list[torch.Tensor]:
    """Let a hook average the gradients that some rank has; see `training.hook_round`."""
    reduced = []
    with torch.no_grad():
        for name, parameter, gradient in members:
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            elif gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            reduced.append((name, parameter, gradient))
        exchange.begin([parameter for _, parameter, _ in reduced], confirm)
        hook.reduce([(name, gradient) for name, _, gradient in reduced], exchange)
        exchange.end()
    return [gradient for _, _, gradient in reduced]
