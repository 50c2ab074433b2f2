"""How `TorchState` saves, restores and sends each kind of object: models, optimizers, samplers, and what has a state dict.

A handler keeps two copies of an object's state. A commit is written over the older one, tensor by tensor and on the
tensors' own devices, so commits allocate nothing once both exist. What another rank sends is received there, too: the
object itself changes only after everything has come.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.checkpoints.kinds import has_state
from hvdlite_torch.collectives.broadcasts import broadcast_structure, load_exactly, with_rooms
from hvdlite_torch.elastic.elastic_sampler import ElasticSampler
from hvdlite_torch.optimizer.outer import WithOuter
from hvdlite_torch.optimizer.sharded import Sharded
from hvdlite_torch.rows import mapped, tensors_in

OWN_STATE = "'s state"
"""What the name of an optimizer's part has in addition that each worker has for itself."""


class StateHandler:
    """Saves, restores and synchronises one attribute of a `TorchState`; a base for your own handlers.

    Register a handler with `set_handler_registry`.

    Attributes:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the object's state to a new place: when another handler fails, this one gets back what it had saved."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what `save` or `sync` has copied last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's state on all ranks, and save it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the object, and save the new one.

        Args:
            value: the new object.
        """
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Handles an object with `state_dict()` and `load_state_dict()`, such as a learning rate scheduler or a `GradScaler`.

    Attributes:
        saved: the last copy.
        staged: the older copy, whose memory the next one takes; or the next one, before `promote`.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.saved: Any = None
        self.staged: Any = None
        self.save()

    def save(self) -> None:
        """Copy the object's state; the last copy stays until the new one is complete."""
        self.stage()
        self.promote()

    def restore(self) -> None:
        """Load the last copy; it stays as it is."""
        self.load(self.saved)

    def sync(self) -> None:
        """Take rank 0's state on all ranks, and save it."""
        runtime = api.runtime()
        if runtime.world.rank == 0:
            self.stage()
        self.staged = broadcast_structure(runtime, self.staged, 0, runtime.names.unnamed("torch", "elastic.handler"))
        self.receive_staged(load=runtime.world.rank != 0)

    def stage(self) -> Any:
        """Copy the object's state over the older copy, and return it; `promote` makes it the saved one."""
        self.staged = copied_over(self.value.state_dict(), self.staged)
        return self.staged

    def parts(self, state: Any) -> dict[str, Any]:
        """Return the parts of a state that are compared and sent by themselves, by what their names add to the object's.

        Args:
            state: a state dict of the object.
        """
        return {"": state}

    def stage_received(self, structure: Any) -> Any:
        """Put memory in place of a received part's placeholders, and return it, for its tensors to be received.

        Args:
            structure: of the state dict, with placeholders for tensors.
        """
        self.staged = with_rooms(structure, self.staged)
        return self.staged

    def receive_staged(self, *, load: bool) -> None:
        """Save the staged copy, which is complete, as the state of rank 0.

        Args:
            load: whether this rank's object has another state.
        """
        if load:
            self.load(self.staged)
        self.promote()

    def small_copy(self, room: Any) -> Any:
        """Return a copy of what a body may change before an optimizer's step; not of parameters.

        Args:
            room: an older copy, over which it may be written; or None.
        """
        return copied_over(self.value.state_dict(), room)

    def load_small(self, small: Any) -> None:
        """Load such a copy, which stays as it is.

        Args:
            small: as `small_copy` has returned it.
        """
        self.load(small)

    def promote(self) -> None:
        """Make the staged copy the saved one."""
        self.saved, self.staged = self.staged, self.saved

    def load(self, structure: Any) -> None:
        """Load a structure like a state dict, which the object must not keep.

        Args:
            structure: a copy of what `state_dict()` returns.
        """
        self.value.load_state_dict(copied_over(structure, None))


class DictHandler(StateDictHandler):
    """Handles an object whose state dict has parts that are sent by themselves."""

    def stage_received(self, structure: Any) -> Any:
        """Put memory in place of a received part's placeholders, in the staged copy of the own state."""
        received = with_rooms(structure, {name: self.staged[name] for name in structure if name in self.staged})
        self.staged.update(received)
        return received


class ModelStateHandler(DictHandler):
    """Handles a module: parameters and buffers."""

    def load(self, structure: Any) -> None:
        """Copy parameters and buffers into the module's own."""
        self.value.load_state_dict(structure)

    def parts(self, state: Any) -> dict[str, Any]:
        """Return parameters and buffers apart: statistics of BatchNorm differ between ranks in any training."""
        buffers = {name for name, _ in self.value.named_buffers()} & state.keys()
        return {"": {name: each for name, each in state.items() if name not in buffers},
                "'s buffers": {name: each for name, each in state.items() if name in buffers}}

    def small_copy(self, room: Buffers | None) -> Buffers:
        """Return a copy of the buffers that commits have, too."""
        places = _buffers_in(self.value)
        tensors = [owner[name] for owner, name in places]
        if room is None or len(tensors) != len(room.tensors) or not all(map(operator.is_, tensors, room.tensors)):
            room = Buffers(places, tensors, [torch.empty_like(tensor) for tensor in tensors])
        with torch.no_grad():
            for copies, sources in room.alike.values():
                torch._foreach_copy_(copies, sources)
        return room

    def load_small(self, small: Buffers) -> None:
        """Copy buffers into the module's own; one that has been replaced since gets a new tensor."""
        with torch.no_grad():
            for (owner, name), tensor, copied in zip(small.places, small.tensors, small.copies, strict=True):
                owner[name] = tensor.copy_(copied)


class OptimizerStateHandler(DictHandler):
    """Handles an optimizer: state, in its own dtypes, and hyper-parameters."""

    def __init__(self, value: Any) -> None:
        if isinstance(value, Sharded):
            raise UnsupportedError("an optimizer with sharded=True cannot be part of an elastic state: when a rank is lost, "
                                   "so is the optimizer state of the parameters that it owns. Leave out sharded=True; or "
                                   "train without hvd.elastic, call hvd.save() now and then, and hvd.load() when the job "
                                   "starts again, on any number of ranks")
        super().__init__(value)

    def load(self, structure: Any) -> None:
        """Load a copy, in the memory of the optimizer's tensors where that fits."""
        load_exactly(self.value, copied_over(structure, self.value.state_dict()))

    def parts(self, state: Any) -> dict[str, Any]:
        """Return each parameter's state apart, where it may differ between ranks."""
        if not isinstance(self.value, WithOuter):
            return {"": state}
        return {"": {name: each for name, each in state.items() if name != "state"}, OWN_STATE: {"state": state["state"]}}

    def small_copy(self, room: Any) -> Any:
        """Return a copy of the hyper-parameters."""
        return copied_over(self._hyper_parameters(), room)

    def load_small(self, small: Any) -> None:
        """Go back to hyper-parameters."""
        for group, before in zip(self.value.param_groups, copied_over(small, self._hyper_parameters()), strict=False):
            group.update(before)

    def _hyper_parameters(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in group.items() if name != "params"} for group in self.value.param_groups]


class ScalerStateHandler(StateDictHandler):
    """Handles a `GradScaler`."""

    def load(self, structure: Any) -> None:
        """Load the scale, without what a step that failed has left, which is no part of the state dict."""
        super().load(structure)
        self.value._per_optimizer_states.clear()

    def small_copy(self, room: Any) -> Any:
        """Return a copy of the scale; `state_dict()` would wait for the GPU."""
        return copied_over(self._scale(), room)

    def load_small(self, small: Any) -> None:
        """Go back to a scale."""
        vars(self.value).update(copied_over(small, self._scale()))
        self.value._per_optimizer_states.clear()

    def _scale(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self.value).items() if name in ("_scale", "_growth_tracker")}


class SamplerStateHandler(StateDictHandler):
    """Handles a sampler, which is divided among the ranks of each new world."""


@dataclasses.dataclass
class Buffers:
    """Buffers of a module, and copies.

    Attributes:
        places: of each buffer, the module's dict and the name in it.
        alike: copies and tensors by kind: for those of one kind a GPU needs one kernel.
    """

    places: list[tuple[dict[str, Any], str]]
    tensors: list[torch.Tensor]
    copies: list[torch.Tensor]
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for copied, tensor in zip(self.copies, self.tensors, strict=True):
            copies, tensors = self.alike.setdefault((tensor.device, tensor.dtype), ([], []))
            copies.append(copied)
            tensors.append(tensor)


def _buffers_in(module: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the places of a module's persistent buffers; in a quarter of the time of `named_buffers()`."""
    places: list[tuple[dict[str, Any], str]] = []
    left: list[Any] = [module]
    while left:
        own = vars(left.pop())
        buffers = own["_buffers"]
        if buffers:
            others = own["_non_persistent_buffers_set"]
            places += [(buffers, name) for name, buffer in buffers.items() if buffer is not None and name not in others]
        left += filter(None, own["_modules"].values())
    return places


def copied_over(structure: Any, room: Any) -> Any:
    """Return a deep copy of a structure, in the memory of another structure's tensors where that fits."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    rooms = tensors_in(room)  # in the order in which they come, which seldom changes

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if type(leaf) in _SHARED else copy.deepcopy(leaf)
        own = next(rooms, None)
        if own is None or not _is_alike(own, leaf):
            return leaf.detach().clone()
        targets.append(own)
        sources.append(leaf.detach())
        return own

    result = mapped(structure, copied)
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
    return result


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.layout is other.layout is torch.strided and one.dtype is other.dtype and one.shape == other.shape
            and one.device == other.device and one.stride() == other.stride())


_SHARED = (bool, int, float, str, type(None), torch.dtype, torch.device)

Registry = list[tuple[type, Callable[[Any], StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.amp.GradScaler, ScalerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the handlers: pairs of a type and the handler of its instances, the first of which that matches is taken."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the handlers for states that are made from now on.

    Args:
        registry: pairs of a type and what makes the handler of an instance; the first that matches is taken.
    """
    global _registry
    _registry = registry


def handler_for(value: Any) -> StateHandler | None:
    """Return a handler for an object; None for one that is saved as a plain object."""
    for kind, make in _registry:
        if isinstance(value, kind):
            return make(value)
    return StateDictHandler(value) if has_state(value) else None
