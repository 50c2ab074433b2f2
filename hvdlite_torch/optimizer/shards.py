"""The parameters of a sharded optimizer: who owns them, and where their values lie so that owners can publish them.

The parameters of an owner lie in one block of memory for each dtype and device, which is what travels. So nothing is packed
before a broadcast, or unpacked after it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from hvdlite.core.errors import UnsupportedError
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.ownership import assign_owners
from hvdlite.training.replicas import check_replicas
from hvdlite_torch.arrays.tensors import dense_strides, on_host
from hvdlite_torch.collectives.broadcasts import broadcast_each, broadcast_structure

_ALIGNMENT: Final = 64
"""Bytes: of a parameter's place in a block, as torch allocates memory."""
_ADVICE: Final = ("A sharded optimizer needs the same parameters, with the same values, on all ranks when it begins: call "
                  "broadcast_parameters before the first step, and freeze the same parameters everywhere")


@dataclasses.dataclass
class _Block:
    """Memory with parameters of one owner, of one dtype, on one device."""

    owner: int  # its number in the job
    memory: torch.Tensor
    parameters: list[torch.Tensor]
    pointers: list[int]

    @classmethod
    def of(cls, owner: int, parameters: list[torch.Tensor]) -> _Block:
        """Move parameters into a new block, with their strides."""
        step = max(1, _ALIGNMENT // parameters[0].element_size())
        begins = list(itertools.accumulate((-(-each.numel() // step) * step for each in parameters), initial=0))
        memory = parameters[0].detach().new_empty(begins[-1])
        for parameter, begin in zip(parameters, begins, strict=False):
            place = memory[begin:begin + parameter.numel()]
            strides = dense_strides(parameter)
            place = place.as_strided(parameter.shape, strides) if strides else place.view(parameter.shape)
            parameter.data = place.copy_(parameter.detach())
        return cls(owner, memory, parameters, [each.data_ptr() for each in parameters])

    @property
    def is_in_use(self) -> bool:
        """Whether all parameters still lie here: `model.to(...)` and the like move them."""
        return all(each.data_ptr() == pointer and each.dtype is self.memory.dtype
                   for each, pointer in zip(self.parameters, self.pointers, strict=True))


class Shards:
    """Who owns the parameters of one optimizer in one world.

    Args:
        label: makes the names of collectives unique, equal on all ranks.
        names: of the parameters.
    """

    def __init__(self, runtime: Runtime, label: str, process_set: int, names: Mapping[torch.Tensor, str]) -> None:
        self._runtime, self._label, self._process_set, self._names = runtime, label, process_set, names
        self._ranks = runtime.members(process_set)
        self._loads = [0] * len(self._ranks)
        self._blocks: list[_Block] = []
        self.owners: dict[torch.Tensor, int] = {}

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give trainable parameters that have no owner to the ranks with the least; all ranks call this alike.

        Raises:
            UnsupportedError: for parameters that share memory.
            ReplicaMismatchError: on all ranks, where they differ between ranks.
        """
        new = [each for each in parameters if each.requires_grad and each not in self.owners]
        if not new:
            return
        self._check_disjoint(new)
        check_replicas(self._runtime, [(name := self._names[each], on_host(each, name)) for each in new],
                       f"{self._label}.owned", self._process_set, _ADVICE)
        found = assign_owners([each.numel() * each.element_size() for each in new], self._loads)
        self.owners.update((each, self._ranks[owner]) for each, owner in zip(new, found, strict=True))
        self._place(new)

    def is_own(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank updates a parameter."""
        return self.owners.get(parameter) == self._runtime.world.rank

    def publish(self) -> None:
        """Give every rank the owners' values."""
        if not all(block.is_in_use for block in self._blocks):
            self._blocks.clear()
            self._place(self.owners)
        broadcast_each(self._runtime, [(block.memory, block.owner) for block in self._blocks], f"{self._label}.values",
                       self._process_set)
        torch.autograd.graph.increment_version([each for each, owner in self.owners.items()
                                                if owner != self._runtime.world.rank])

    def gather(self, states: Mapping[torch.Tensor, Any], root: int | None) -> dict[torch.Tensor, Any]:
        """Return the state that this rank lacks on one rank, or on all, and nothing elsewhere; all ranks call this."""
        parameters, rank = list(self.owners), self._runtime.world.rank
        found: dict[torch.Tensor, Any] = {}
        for owner in self._ranks:
            if owner == root:
                continue
            own = {index: states[each] for index, each in enumerate(parameters)
                   if self.owners[each] == owner and each in states}
            received = broadcast_structure(self._runtime, own, owner, f"{self._label}.state.{owner}", self._process_set)
            if root in (rank, None) and owner != rank:
                found.update((parameters[index], state) for index, state in received.items())
        return found

    def _place(self, parameters: Iterable[torch.Tensor]) -> None:
        alike: dict[Any, list[torch.Tensor]] = {}
        for each in parameters:
            alike.setdefault((self.owners[each], each.dtype, each.device), []).append(each)
        self._blocks += [_Block.of(owner, each) for (owner, *_), each in alike.items()]

    def _check_disjoint(self, parameters: Iterable[torch.Tensor]) -> None:
        end, before = 0, ""
        for begin, nbytes, name in sorted(self._places(parameters)):
            if begin < end and nbytes:
                raise UnsupportedError(f"sharded=True: parameters '{before}' and '{name}' share memory, so their owners "
                                       "would overwrite each other's updates; make them one parameter")
            end, before = max(end, begin + nbytes), name

    def _places(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[int, int, str]]:
        for each in parameters:
            yield each.data_ptr(), each.numel() * each.element_size(), self._names[each]
