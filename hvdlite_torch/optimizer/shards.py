"""The parameters of a sharded optimizer: who owns them, and where their values lie so that owners can publish them.

The parameters of an owner lie in one block of memory for each dtype and device, which is what travels. So nothing is packed
before a broadcast, or unpacked after it. On one host the owner's block is in memory that the others read instead.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hvdlite.core.array import Array
from hvdlite.core.errors import StepFailedError, UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.negotiation.agreement import named_ranks
from hvdlite.runtime.common_memory import common_memory
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.objects import allgather_object
from hvdlite.training.ownership import assign_owners, why_uneven
from hvdlite.training.replicas import check_replicas
from hvdlite_torch.arrays import cuda
from hvdlite_torch.arrays.tensors import dense_strides, host_tensor, on_host
from hvdlite_torch.collectives.broadcasts import broadcast_each, broadcast_structure

_ALIGNMENT: Final = 64
"""Bytes: of a parameter's place in a block, as torch allocates memory."""
_ADVICE: Final = ("A sharded optimizer needs the same parameters, with the same values, on all ranks when it begins: call "
                  "broadcast_parameters before the first step, and freeze the same parameters everywhere")


@dataclasses.dataclass
class _Block:
    """Memory with parameters of one owner, of one dtype, on one device.

    Attributes:
        owner: its number in the job.
        memory: with this rank's values.
        source: with the owner's, where this rank sees them; on the owner it is `memory` itself.
        places: of the parameters, each with a storage of its own: `torch.save` of one writes that one only.
        begins: of the places in `memory`, in elements.
        addresses: of the places; torch moves a storage to other memory (`share_memory()`), with the place and the parameter.
        copy: of `memory`, for a child while it is forked.
    """

    owner: int
    memory: torch.Tensor
    source: torch.Tensor | None
    parameters: list[torch.Tensor]
    places: list[torch.Tensor]
    begins: list[int]
    addresses: list[int]
    copy: torch.Tensor | None = None

    @classmethod
    @torch.inference_mode(False)
    def of(cls, owner: int, parameters: list[torch.Tensor], common: Callable[[int], Array | None], *,
           is_own: bool) -> _Block:
        """Move parameters into a new block, with their strides.

        Args:
            common: returns so many bytes that the owner shares with the other ranks; None if there are none.
        """
        first = parameters[0].detach()
        step = max(1, _ALIGNMENT // first.element_size())
        begins = list(itertools.accumulate((-(-each.numel() // step) * step for each in parameters), initial=0))
        seen = None if cuda.is_on_gpu(first) else common(begins[-1] * first.element_size())
        source = None if seen is None else host_tensor(seen).view(first.dtype)
        memory = source if is_own and source is not None else first.new_empty(begins[-1])
        strides = [dense_strides(each) or torch.empty(each.shape, device="meta").stride() for each in parameters]
        places = [_place(memory, begin, each.shape, stride)
                  for begin, each, stride in zip(begins, parameters, strides, strict=False)]
        block = cls(owner, memory, source, parameters, places, begins[:-1], [each.data_ptr() for each in places])
        block.take_in()
        return block

    @property
    def fits(self) -> bool:
        """Whether the parameters have their dtype, device and shape still."""
        return all(each.dtype is place.dtype and each.device == place.device and each.shape == place.shape
                   for each, place in zip(self.parameters, self.places, strict=True))

    @torch.inference_mode(False)
    def take_in(self) -> None:
        """Move parameters here that lie elsewhere: `model.to(...)` and the like give them other memory."""
        for index, (parameter, place) in enumerate(zip(self.parameters, self.places, strict=True)):
            if parameter.data_ptr() != self.addresses[index]:
                self.places[index] = _place(self.memory, self.begins[index], place.shape, place.stride())
                parameter.data = self.places[index].copy_(parameter.detach())

    @torch.inference_mode(False)
    def copy_for_child(self) -> None:
        """Copy memory that a forked child would share with this process."""
        if self.source is self.memory:
            self.copy = self.memory.clone()

    @torch.inference_mode(False)
    def move_in_child(self) -> None:
        """Move parameters into the copy, without torch's threads: they do not exist in a forked child."""
        for index, (parameter, place) in enumerate(zip(self.parameters, self.places, strict=True)):
            if self.copy is not None and parameter.data_ptr() == self.addresses[index]:
                parameter.data = _place(self.copy, self.begins[index], place.shape, place.stride())


def _place(memory: torch.Tensor, begin: int, shape: torch.Size, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a part of a block as a tensor with a storage of its own."""
    own = memory[begin:begin + shape.numel()].view(torch.uint8)
    place: torch.Tensor = torch.from_dlpack(own).view(memory.dtype)  # type: ignore[attr-defined]
    return place.as_strided(shape, strides)


class Shards:
    """Who owns the parameters of one optimizer in one world.

    Args:
        label: makes the names of collectives unique, equal on all ranks.
        names: of the parameters.
    """

    def __init__(self, runtime: Runtime, label: str, process_set: int, names: Mapping[torch.Tensor, str]) -> None:
        self._runtime, self._label, self._process_set, self._names = runtime, label, process_set, names
        self._ranks = runtime.members(process_set)
        self._count = 0  # of blocks in all
        self._loads = [0] * len(self._ranks)
        self.blocks: list[_Block] = []
        self.owners: dict[torch.Tensor, int] = {}
        _shards.add(self)

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give parameters that are trained and have no owner to the ranks with the least; all ranks call this alike.

        Raises:
            UnsupportedError: for parameters that share memory.
            ReplicaMismatchError: on all ranks, where they differ between ranks.
        """
        every = [each for each in parameters if not is_lazy(each)]
        new = [each for each in every if (each.requires_grad or each.grad is not None) and each not in self.owners]
        if not new:
            return
        self._check_disjoint(every)  # also frozen ones
        check_replicas(self._runtime, [(name := self._names[each], on_host(each, name)) for each in new],
                       f"{self._label}.owned", self._process_set, _ADVICE)
        found = assign_owners([each.numel() * each.element_size() for each in new], self._loads)
        self.owners.update((each, self._ranks[owner]) for each, owner in zip(new, found, strict=True))
        self._place(new)

    def is_own(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank updates a parameter."""
        return self.owners.get(parameter) == self._runtime.world.rank

    def publish(self, *, has_failed: bool, has_state: bool) -> tuple[bool, bool]:
        """Give every rank the owners' values; all ranks call this at the end of a step, also of one that has raised.

        Args:
            has_failed: whether the step has raised on this rank.
            has_state: whether there is optimizer state on it.

        Returns:
            Whether these are true on some rank.

        Raises:
            UnsupportedError: on the ranks that are left, when others have called `join()`.
        """
        if not all(block.fits for block in self.blocks):  # on all ranks: the model has been cast
            self.blocks.clear()
            self._place(self.owners)
        for block in self.blocks:
            block.take_in()
        unseen = [(block.memory, block.owner) for block in self.blocks if block.source is None]
        mine = np.array([has_failed, has_state, True], np.int64)
        counts = np.empty_like(mine)
        stepped = self._runtime.allreduce(f"{self._label}.stepped", mine, counts, ReduceOp.SUM,
                                          process_set=self._process_set, blocking=not unseen)
        broadcast_each(self._runtime, unseen, f"{self._label}.values", self._process_set)
        stepped.wait()  # by now the owners have written
        if counts[2] < len(self._ranks):
            raise UnsupportedError(f"rank {self._runtime.world.rank}: step() of a sharded optimizer needs all ranks, and "
                                   f"only {counts[2]} of {len(self._ranks)} have called it: the others are in join(), so "
                                   "nobody updates the parameters that they own. Give all ranks equally many batches, or "
                                   "use sharded=False")
        if len(unseen) < len(self.blocks):
            for block in self.blocks:
                if block.source is not None and block.source is not block.memory:
                    block.memory.copy_(block.source)
            self._runtime.barrier(f"{self._label}.read", process_set=self._process_set, blocking=True).wait()
        torch.autograd.graph.increment_version([each for each, owner in self.owners.items()
                                                if owner != self._runtime.world.rank])
        return bool(counts[0]), bool(counts[1])

    def explain(self, failure: str) -> None:
        """Exchange what a step has raised; all ranks call this.

        Args:
            failure: on this rank; nothing if it has not raised.

        Raises:
            StepFailedError: on those ranks where it has not.
        """
        failures = dict(zip(self._ranks, allgather_object(self._runtime, failure, f"{self._label}.failures",
                                                          self._process_set), strict=True))
        if failure:
            return
        failed = [rank for rank, each in failures.items() if each]
        what = "; ".join(f"rank {rank}: {failures[rank]}" for rank in failed)
        raise StepFailedError(f"step() of a sharded optimizer has raised on {named_ranks(failed)}, so parameters that "
                              f"{'it owns' if len(failed) == 1 else 'they own'} may lack the update: {what}. All ranks have "
                              "equal parameters; catch the error on all ranks to train on", failed[0])

    def ownership(self) -> tuple[int, str]:
        """Return the bytes that this rank owns, and why parts are unequal, if one parameter is the reason."""
        sizes = {self._names[each]: each.numel() * each.element_size() for each in self.owners}
        owners = {self._names[each]: owner for each, owner in self.owners.items()}
        own = sum(size for name, size in sizes.items() if owners[name] == self._runtime.world.rank)
        return own, why_uneven(sizes, owners, len(self._ranks))

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
        for parameter in parameters:
            alike.setdefault((self.owners[parameter], parameter.dtype, parameter.device), []).append(parameter)
        for (owner, *_), each in alike.items():
            self._count += 1
            name = f"{self._label}.block.{self._count}"
            common = functools.partial(common_memory, self._runtime, name, owner, process_set=self._process_set)
            self.blocks.append(_Block.of(owner, each, common,
                                          is_own=owner == self._runtime.world.rank))

    def leave_common_memory(self) -> None:
        """The world ends, and the memory that ranks share with it."""
        for block in self.blocks:
            if block.source is block.memory:
                _Block.of(block.owner, block.parameters, lambda nbytes: None, is_own=True)

    def _check_disjoint(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise for parameters with common elements: once one of them has moved into a block, they have none in common."""
        end, alike = 0, list[torch.Tensor]()  # whose memory overlaps, perhaps between their elements only
        for each in sorted((each for each in parameters if each.numel()), key=torch.Tensor.data_ptr):
            if each.data_ptr() >= end:
                alike.clear()
            alike.append(each)
            end = max(end, each.data_ptr() + _extent(each))
            if len(alike) > 1:
                self._check_last(alike)

    def _check_last(self, parameters: list[torch.Tensor]) -> None:
        """Raise if the last parameter has elements of others that begin before it."""
        *others, last = parameters
        begin = parameters[0].data_ptr()
        used = torch.zeros(max(each.data_ptr() + _extent(each) for each in parameters) - begin, dtype=torch.bool)
        own = _bytes_in(used, last, begin)
        for other in others:
            _bytes_in(used, other, begin).fill_(True)
            if own.any():
                raise UnsupportedError(f"sharded=True: parameters '{self._names[other]}' and '{self._names[last]}' share "
                                       "memory, so their owners would overwrite each other's updates; make them one "
                                       "parameter")


def _extent(parameter: torch.Tensor) -> int:
    """Return the bytes between the first element of a parameter and the end of its last."""
    return parameter.element_size() * (1 + sum(
        (size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)))


def _bytes_in(memory: torch.Tensor, parameter: torch.Tensor, begin: int) -> torch.Tensor:
    """Return those elements of `memory`, one for each byte from the address `begin` on, that a parameter lies in."""
    size = parameter.element_size()
    distinct = [length if stride else 1 for length, stride in zip(parameter.shape, parameter.stride(), strict=True)]
    return memory.as_strided((*distinct, size), (*(each * size for each in parameter.stride()), 1),
                             parameter.data_ptr() - begin)


def _at_fork(stage: Callable[[_Block], None]) -> Callable[[], None]:
    def of_all_blocks() -> None:
        for block in [block for shards in _shards for block in shards.blocks]:
            stage(block)
    return of_all_blocks


def _drop_copy(block: _Block) -> None:
    block.copy = None


_shards: weakref.WeakSet[Shards] = weakref.WeakSet()
"""Of this process."""
os.register_at_fork(before=_at_fork(_Block.copy_for_child), after_in_child=_at_fork(_Block.move_in_child),
                    after_in_parent=_at_fork(_drop_copy))
