"""The state of an elastic training with PyTorch: models, optimizers, samplers, schedulers, and plain attributes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.elastic.state import ComparedState, ObjectState, Part, explained, pickled
from hvdlite.training.mirrored.shares import plain, shares_asked
from hvdlite.training.replicas import digest, named_parts
from hvdlite_torch import checkpoints  # noqa: F401 - it knows torch's objects
from hvdlite_torch.arrays.tensors import on_host
from hvdlite_torch.collectives.broadcasts import Placeholder, broadcast_tensors, taken_out, with_rooms
from hvdlite_torch.elastic.body_loader import SCALE, BodyLoader
from hvdlite_torch.elastic.elastic_sampler import ElasticSampler
from hvdlite_torch.elastic.handlers import OWN_STATE, StateDictHandler, StateHandler, handler_for
from hvdlite_torch.optimizer.outer import WithOuter, has_workers

_ALIKE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, ElasticSampler)
"""Types whose state dicts are equal on all ranks after `sync`, if scripts do not change how they are loaded."""


class TorchState(ComparedState):
    """The state of a training with PyTorch, for `hvd.elastic.run`; has Horovod's arguments.

    A commit copies everything on its own device, over the older of two copies. `sync` sends those attributes of rank 0 that
    differ on some rank, in one broadcast of tensors, and changes nothing before it has come.

    Args:
        model: a module.
        optimizer: an optimizer, distributed or not.
        kwargs: more of them, samplers (`ElasticSampler`), objects with `state_dict()` and `load_state_dict()` such as
            learning rate schedulers and `GradScaler`s, and plain objects, which are copied and pickled. All are attributes.

    Raises:
        UnsupportedError: when something cannot be copied or pickled, naming the attribute.
        ValueError: for the name of a method.
    """

    _plain = (*ComparedState._plain, torch.Tensor)
    _loop: tuple[Any, BodyLoader] | None = None
    """The last loader given to `loop`, and what iterates over it."""
    _watched: list[torch.Tensor] | None = None
    """The parameters of the state; None if they are to be listed anew."""
    _scale_callbacks: tuple[Callable[[int], object], ...] = ()
    _keeps_gradients = True
    _same_by_repr = ComparedState._same_by_repr | {torch.dtype, torch.device, Placeholder}

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self._handlers: dict[str, StateHandler] = {}
        _keep_freed_memory()
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            if not self._handles(name, value):
                plain[name] = value
        vars(self)["epoch"] = 0  # kept by `loop`, as is the place; both are in the first copy, too
        super().__init__(**plain, _place=None)

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace an attribute; a model, an optimizer and the like are saved at once."""
        handlers = vars(self).get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
            self._watched = None
        elif name in vars(self).get("_tracked", ()) and self._handles(name, value):
            return
        super().__setattr__(name, value)

    def loop(self, loader: torch.utils.data.DataLoader[Any], epochs: int,
             global_batch: int | str | None = None, shares: str | Sequence[float] | Mapping[str, float] | None = None
             ) -> Iterator[Any]:
        """Yield this rank's shards of the global batches that are left of so many epochs.

        Body b of an epoch has the samples b*B to (b+1)*B whatever the world, and a change of the world goes on at the next
        body. Gradients are weighted by rows: losses are means over the batch. The last batch is shared and not padded.
        `epoch` tells the epoch. No `commit`, `set_epoch` or sampler for ranks is needed.

        Args:
            loader: over all samples; persistent workers live on when the world changes.
            epochs: at which the loop ends, counted from `epoch` 0.
            global_batch: samples of all ranks together; by default the loader's batch size. With "scale" it is the loader's
                batch size times the number of ranks (see `on_scale`).
            shares: of the ranks in global batches, like those of a `MirroredStrategy`: None for equal ones, a number for
                each rank (a list) or for each rank on a host (a dict by host name), or "auto" to follow the ranks' speeds.
                In each world those of its ranks and hosts count; ranks without a number get the mean of the others' shares.

        Raises:
            HostsUpdatedInterrupt: between bodies, when members come or go. `hvd.elastic.run` handles it.
            MismatchError: on all ranks, when they ask for different shares.
            TypeError: for something else than a DataLoader of samples by index.
            ValueError: for a sampler that divides the samples itself, and for another global batch or other shares.
        """
        if self._loop is None or self._loop[0] is not loader:
            self._loop = (loader, BodyLoader(loader))
        bodies = self._loop[1]
        rows = bodies.global_batch(global_batch)
        shares_asked(plain(shares), (), is_elastic=True)
        if global_batch == SCALE:
            for callback in self._scale_callbacks:
                callback(rows)
        return bodies.bodies(self, epochs, rows, shares)

    def on_scale(self, callback: Callable[[int], object]) -> None:
        """Call a function with the global batch, in samples, when a loop with `global_batch="scale"` begins in a world.

        It sets what depends on the batch, such as the learning rate, to a value that does not depend on the one before.

        Args:
            callback: a function of the global batch, in samples.
        """
        self._scale_callbacks = (*self._scale_callbacks, callback)

    def save(self) -> None:
        """Copy everything; when a copy fails, the last commit stays whole."""
        staging = self._built_in()
        for name, handler in staging.items():
            self._checked(name, handler.stage)
        attributes = self._copied()
        self._let_others(lambda other: other.save())
        for handler in staging.values():
            handler.promote()
        self._saved = attributes

    def restore(self) -> None:
        """Go back to the last `save` or `sync`."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take rank 0's state, and save it.

        Raises:
            UnsupportedError: on all ranks, when something of rank 0 cannot be pickled.
            ValueError: when rank 0's state was made of other parts than this rank's.
            ReplicaMismatchError: on all ranks, when the states are not equal afterwards.
        """
        runtime = api.runtime()
        is_root = runtime.world.rank == 0
        handlers, digests = self._built_in(), Digests()
        kept = {name + OWN_STATE for name, handler in handlers.items()
                if isinstance(handler.value, WithOuter) and handler.value.recover()}
        states: dict[str, Part] = {}
        owners: dict[str, tuple[StateDictHandler, str]] = {}  # of parts: the handlers, and which part of theirs
        for name, handler in handlers.items():
            for added, each in handler.parts(self._checked(name, handler.value.state_dict)).items():
                states[name + added] = _part(name, each, digests)
                owners[name + added] = handler, added
        found = self._compare(states, {name: _part(name, value, digests) for name, value in self._attributes().items()},
                              kept)
        tensors: list[torch.Tensor] = []
        values: dict[str, Any] = {}
        for handler in handlers.values():
            handler.stage()
        for name, part in found.parts.items():
            if name not in found.sent:
                continue
            if name in kept and not is_root:
                value = with_rooms(part.structure, None)  # for others
            elif name in owners:
                handler, added = owners[name]
                value = handler.parts(handler.staged)[added] if is_root else handler.stage_received(part.structure)
            else:
                value = part.tensors if is_root else values.setdefault(name, with_rooms(part.structure, None))
            taken_out(value, tensors)
        broadcast_tensors(runtime, tensors, 0, "elastic.tensors")
        self._let_others(lambda other: other.sync())
        lacking = {owners[name][0] for name in found.lacking if name in owners}
        for handler in handlers.values():
            is_sampler = isinstance(handler.value, ElasticSampler)  # all ranks divide anew what is left
            handler.receive_staged(load=handler in lacking or is_sampler)
        if found.lacking or self._others():
            digests = Digests()
        self._assign(values)
        self._take_position(found.position)
        ObjectState.save(self)
        self._check_replicas(self._replicated(found.parts.keys() - states.keys(), digests))

    def _small_copy(self, room: Any) -> Any:
        self._can_repeat_steps = any(has_workers(handler.value) for handler in self._handlers.values())
        handlers = {name: handler for name, handler in self._handlers.items() if isinstance(handler, StateDictHandler)}
        if len(handlers) < len(self._handlers):
            return None  # a handler of the script's, of which it is not known what a body changes
        rooms = {} if room is None else room[0]
        small = {name: self._checked(name, lambda name=name, handler=handler: handler.small_copy(rooms.get(name)))
                 for name, handler in handlers.items()}
        return small, super()._small_copy(None)

    def _steps_so_far(self) -> Any:
        """Also steps that nobody reports: of optimizers that are not distributed, and by hand."""
        if self._watched is None:
            values = [handler.value for handler in self._handlers.values()]
            self._watched = list(dict.fromkeys(parameter for each in values for parameter in parameters_of(each)))
        return super()._steps_so_far(), sum([parameter._version for parameter in self._watched])

    def _load_small(self, small: Any) -> None:
        states, others = small
        for parameter in self._watched or ():
            parameter.grad = None  # of the body that is run again; distributed optimizers have cleared theirs
        for name, each in states.items():
            cast(StateDictHandler, self._handlers[name]).load_small(each)
        super()._load_small(others)

    def _durable_parts(self) -> dict[str, Any]:
        unknown = [name for name, handler in self._handlers.items() if not isinstance(handler, StateDictHandler)]
        if unknown:
            raise UnsupportedError(f"attribute '{unknown[0]}' of the elastic state has a handler of the script's, so no "
                                   "checkpoint of it can be written; call hvd.save in the training function")
        if any(isinstance(handler.value, WithOuter) for handler in self._handlers.values()):
            raise UnsupportedError("a checkpoint of the state is divided among the ranks, and with outer= each worker has "
                                   "its own: save optimizer.state_dict() and the model on each rank with torch.save")
        return {**super()._durable_parts(), **{name: handler.value for name, handler in self._handlers.items()}}

    def reset(self) -> None:
        """Divide what samplers have left among the ranks of the new world."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def _replicated(self, sent: Collection[str], digests: Digests | None = None) -> Iterator[tuple[str, Array | int]]:
        states = {name: _equal_part(handler.value) for name, handler in self._built_in().items()}
        known = digests or Digests()
        return named_parts("state", {**states, **{name: getattr(self, name) for name in sent}}, known.of)

    def _built_in(self) -> dict[str, StateDictHandler]:
        """Return the handlers whose copies are made and sent together with those of others."""
        return {name: handler for name, handler in self._handlers.items()
                if isinstance(handler, StateDictHandler)
                and all(getattr(type(handler), each) is getattr(StateDictHandler, each) for each in ("save", "sync"))}

    def _others(self) -> list[StateHandler]:
        """Return the other handlers, which save and send by themselves."""
        built_in = self._built_in()
        return [handler for name, handler in self._handlers.items() if name not in built_in]

    def _let_others(self, method: Callable[[StateHandler], None]) -> None:
        """Let the handlers that save and send by themselves do so: all of them, or none.

        They may make collectives, which fail when a rank is lost. Then those that have done it already get back what they
        had saved, so that the last commit stays the one of all attributes.
        """
        others = self._others()
        before = [dict(vars(other)) for other in others]
        try:
            for other in others:
                method(other)
        except BaseException:
            for other, fields in zip(others, before, strict=True):
                vars(other).clear()
                vars(other).update(fields)
            raise

    def _handles(self, name: str, value: Any) -> bool:
        """Begin to handle an attribute, if there is a handler for it."""
        handler = self._checked(name, lambda: handler_for(value), value)
        if handler is None:
            return False
        if isinstance(handler, StateDictHandler):
            pickled(name, taken_out(handler.saved, []))
        self._handlers[name] = handler
        self._watched = None
        object.__setattr__(self, name, value)
        return True

    def _checked(self, name: str, copy: Any, value: Any = None) -> Any:
        """Call a function that copies an attribute; an object that cannot be copied is an error with its name."""
        value = self._handlers[name].value if name in self._handlers else value
        with explained(name, value, "copied", RuntimeError):  # torch's own errors explain themselves
            return copy()

    def _parts(self) -> list[str]:
        left_out = {name for name in ("model", "optimizer") if getattr(self, name, None) is None}
        return sorted({*super()._parts(), *self._handlers} - left_out)

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in super()._attributes().items() if name not in self._handlers}


def parameters_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of a module or an optimizer; none of anything else."""
    if isinstance(value, torch.optim.Optimizer):
        yield from (parameter for group in value.param_groups for parameter in group["params"])
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()


def _keep_freed_memory() -> None:
    """Let glibc keep the memory that each step frees: freeing a block of up to 32 MB raises its limits.

    Source: mallopt(3), M_MMAP_THRESHOLD. The copies of commits fill the gaps of the heap, so temporary tensors come to lie
    at its end, which is given back to the system when more than 2 MB are free there. With 40 MB of copies each step of 14 ms
    then paid for 800 new pages, 1.2 to 2 ms. Elsewhere this has no effect.
    """
    torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)


def _equal_part(value: Any) -> Any:
    """Return what is equal on all ranks after `sync` in an object's state dict; the rest may depend on the rank."""
    state = value.state_dict() if isinstance(value, (torch.nn.Module, *_ALIKE)) else None
    if isinstance(value, torch.nn.Module):  # a script defines its own extra state, and may add what is no tensor
        return {name: each for name, each in state.items()
                if isinstance(each, torch.Tensor) and not name.endswith("_extra_state")}
    if has_workers(value):
        return {name: each for name, each in state.items() if name != "state"}
    loads = getattr(type(value), "load_state_dict", None)
    return state if getattr(loads, "__module__", "").partition(".")[0] in ("torch", "hvdlite_torch") else None


# --- what `sync` compares, and sends only where it differs ---------------------------------------------------------------


class Digests:
    """Digests of tensors, each of which is computed once; for tensors that do not change meanwhile."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[torch.Tensor, int | None]] = {}  # the tensors keep their addresses

    def of(self, name: str, value: Any) -> int | None:
        """Return the digest of a tensor; None for other objects, and for tensors that collectives do not carry."""
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided:
            return _digest(name, value)
        key = value.data_ptr(), value.device, value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
        if key not in self._known:
            self._known[key] = value, _digest(name, value)
        return self._known[key][1]


def _part(name: str, value: Any, digests: Digests) -> Part:
    """Return what an attribute consists of."""
    tensors: list[torch.Tensor] = []
    structure = taken_out(value, tensors)
    return Part(structure, tensors, [digests.of(name, tensor) for tensor in tensors])


def _digest(name: str, tensor: torch.Tensor) -> int | None:
    try:
        array: Array = on_host(tensor, name)
    except UnsupportedError:
        return None
    return digest(array)
