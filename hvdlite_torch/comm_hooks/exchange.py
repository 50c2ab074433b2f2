"""The arguments of a communication hook: the gradients of a round, and collectives over the ranks that share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.framework import SMALL
from hvdlite_torch.arrays import cuda
from hvdlite_torch.arrays.tensors import as_runtime_array, as_tensor, contiguous

Gradients = Sequence[tuple[str, torch.Tensor]]
"""Names, equal on all ranks, and dense gradients to be overwritten with their averages over all ranks."""


class CommHook(Protocol):
    """The interface of `comm_hook`.

    A hook can have an attribute `is_idempotent`: averaging averages again leaves them as they are, so parameters can have
    several backward passes before a step. A second one raises with other hooks.
    """

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients over all ranks, in place; called on all ranks with the same names in the same order.

        Args:
            gradients: pairs of a name and a dense tensor; written in place.
            exchange: collectives over the ranks that share gradients.
        """


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
        """Use the collectives of a runtime from now on.

        Args:
            runtime: of this world.
            label: begins the names of collectives.
            process_set: its id.
        """
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
        """Average tensors in place, as one group.

        Args:
            name: for messages and matching, the same on all ranks; another one for each call in a round.
            tensors: of floating-point dtypes; the same shapes and dtypes on all ranks.
        """
        self.start_average(name, tensors)()

    def start_average(self, name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start to average tensors in place, as one group; return a function that waits until they are averaged.

        Args:
            name: for messages and matching, the same on all ranks; another one for each call in a round.
            tensors: as in `average`.
        """
        return self._start_reduction(name, tensors, ReduceOp.AVERAGE)

    def largest(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the largest values of a tensor over all ranks, element by element.

        Args:
            name: for messages and matching, the same on all ranks; another one for each call in a round.
            tensor: the same shape and dtype on all ranks.
        """
        result = tensor.clone()
        self._start_reduction(name, [result], ReduceOp.MAX)()
        return result

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors, concatenated along the first dimension.

        Args:
            name: for messages and matching, the same on all ranks; another one for each call in a round.
            tensor: the same shape and dtype on all ranks, but for the number of rows.
        """
        devices = self._runtime.devices
        source = cuda.to_transportable(contiguous(tensor, name), devices, Collective.ALLGATHER)
        handle = self._runtime.allgather(f"{self._label}.{name}", as_runtime_array(source, name, devices),
                                         process_set=self._process_set)
        return as_tensor(cuda.wait(handle)).to(tensor.device)

    def _start_reduction(self, name: str, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Callable[[], None]:
        alike: dict[Any, list[torch.Tensor]] = {}  # those that are sent as one tensor
        for tensor in tensors:
            alike.setdefault((tensor.dtype, tensor.device) if tensor.nbytes <= SMALL else id(tensor), []).append(tensor)
        if not alike:
            return _nothing
        devices = self._runtime.devices
        sent = [some[0] if len(some) == 1 else torch.cat([each.reshape(-1) for each in some]) for some in alike.values()]
        dense = [cuda.to_transportable(contiguous(tensor, name), devices, Collective.ALLREDUCE, op) for tensor in sent]
        arrays = [as_runtime_array(tensor, name, devices) for tensor in dense]
        handle = self._runtime.grouped_allreduce(f"{self._label}.{name}", arrays, arrays, op, process_set=self._process_set)

        def wait() -> None:
            cuda.wait(handle)
            for some, result in zip(alike.values(), dense, strict=True):
                if len(some) > 1:
                    torch._foreach_copy_(some, parts(result, some))
                elif some[0].data_ptr() != result.data_ptr():
                    some[0].copy_(result)
        return wait


class AllReduce:
    """Plain averaging, as without a hook, but after backward."""

    is_idempotent = True

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients.

        Args:
            gradients, exchange: as in `CommHook`.
        """
        exchange.average("gradients", [gradient for _, gradient in gradients])


def parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat tensor with the shapes of other ones, one after the other."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


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
