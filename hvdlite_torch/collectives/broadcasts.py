"""Broadcasts of parameters, optimizer state and objects, so that all ranks start with the same state.

Buffers are broadcast (BatchNorm's running statistics) from one rank: on demand, or before forward passes as DDP does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite import api
from hvdlite.core.errors import MismatchError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID, ProcessSet, global_process_set
from hvdlite.core.types import Collective
from hvdlite.runtime.runtime import Runtime
from hvdlite.training import objects, replicas
from hvdlite_torch.arrays import cuda
from hvdlite_torch.arrays.tensors import as_array, as_runtime_array, contiguous, dense_strides, on_host
from hvdlite_torch.mistakes import leave_out, note_broadcast
from hvdlite_torch.ops import broadcast_async_
from hvdlite_torch.rows import mapped, tensors_in
from hvdlite_torch.uncompiled import leave_module_to_python


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int,
                         process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors with rank `root_rank`'s, in place.

    In a process that joins an elastic job, this does nothing, like `broadcast_optimizer_state` and `broadcast_object`:
    `hvd.elastic.run` synchronises the state.

    Args:
        params: a `state_dict()`, or `named_parameters()`, or a list of tensors. Entries of a dict that are not tensors are
            left alone.
        root_rank: the rank whose values all get.
        process_set: the ranks that take part.

    Raises:
        ValueError: for anything else.
        MismatchError: when a tensor's shape or dtype differs between ranks.
    """
    if api.is_provisional():
        return
    named = list(_named(params))
    handles = [broadcast_async_(tensor.detach(), root_rank, f"parameters.{name}", process_set) for name, tensor in named]
    for handle in handles:
        try:
            handle.wait()
        except MismatchError as error:
            raise MismatchError("broadcast_parameters: the ranks' models differ; make the same model on all ranks. "
                                f"{error}") from error
    note_broadcast(tensor for _, tensor in named)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give all ranks the optimizer state and hyper-parameters of rank `root_rank`.

    Works for every torch optimizer, stepped or not: the state's structure travels as an object and its tensors as tensors,
    so no step is taken to create it. Tensors keep their dtypes.

    Args:
        optimizer: plain or distributed.
        root_rank: the rank whose state all get.
        model: accepted for Horovod's sake; not needed.

    Raises:
        HorovodInternalError: like every collective.
    """
    del model
    if not api.is_provisional():
        runtime = api.runtime()
        before = runtime.exchanged
        _broadcast_state(runtime, optimizer, root_rank)
        leave_out(runtime.exchanged - before)


def take_over(runtime: Runtime, optimizer: torch.optim.Optimizer, root_rank: int,
              models: Iterable[torch.nn.Module] = ()) -> None:
    """Copy rank `root_rank`'s parameters, optimizer state, and models' parameters and buffers to every rank."""
    tensors = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        tensors.update((id(tensor), tensor) for tensor in (*model.parameters(), *model.buffers()))
    broadcast_tensors(runtime, [tensor.detach() for tensor in tensors.values()], root_rank, "take_over.parameters")
    _broadcast_state(runtime, optimizer, root_rank)


def _broadcast_state(runtime: Runtime, optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    is_root = runtime.world.rank == root_rank
    if hasattr(optimizer, "consolidate_state_dict"):  # a part of its state is on each rank
        optimizer.consolidate_state_dict(to=root_rank)
    state = broadcast_structure(runtime, optimizer.state_dict() if is_root else None, root_rank, "optimizer_state")
    if not is_root or hasattr(optimizer, "synchronize_outer"):  # whose exchanges begin again on all ranks
        load_exactly(optimizer, state)


def load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any],
                 load: Callable[[dict[str, Any]], Any] | None = None) -> None:
    """Load a state dict that belongs to the caller, so that its tensors keep their dtypes.

    torch casts floating-point state to its parameter's dtype: float32 moments of bfloat16 parameters would lose their bits.

    Args:
        load: another function than `optimizer.load_state_dict`.
    """
    (load or optimizer.load_state_dict)(state)
    for saved, group in zip(state.get("param_groups", ()), optimizer.param_groups, strict=False):
        for key, parameter in zip(saved["params"], group["params"], strict=True):
            if parameter in optimizer.state and key in state["state"]:
                optimizer.state[parameter] = _with_dtypes_of(state["state"][key], optimizer.state[parameter])


def _with_dtypes_of(saved: Any, loaded: Any) -> Any:
    """Return the loaded structure of state, where tensors that were cast are replaced by the saved ones."""
    if isinstance(loaded, torch.Tensor):
        was_cast = isinstance(saved, torch.Tensor) and saved.dtype is not loaded.dtype and saved.shape == loaded.shape
        return saved.to(loaded.device) if was_cast else loaded
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        for key in loaded:
            if key in saved:
                loaded[key] = _with_dtypes_of(saved[key], loaded[key])
    elif type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(loaded)(map(_with_dtypes_of, saved, loaded))
    return loaded


def broadcast_structure(runtime: Runtime, value: Any, root_rank: int, name: str,
                        process_set: int = GLOBAL_PROCESS_SET_ID) -> Any:
    """Return the root's structure of dicts, lists, tuples, tensors and objects; the others' `value` is ignored."""
    tensors: list[torch.Tensor] = []  # in the order in which they come in the structure, on all ranks
    is_root = runtime.world.rank == root_rank
    structure = objects.broadcast_object(runtime, taken_out(value, tensors) if is_root else None, root_rank,
                                         f"{name}.structure", process_set)
    if not is_root:
        value = with_rooms(structure, None)
        taken_out(value, tensors)
    broadcast_tensors(runtime, tensors, root_rank, name, process_set)
    return value


def taken_out(structure: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a structure with placeholders for its tensors, which are appended to a list."""
    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf.detach())
        return Placeholder(leaf)
    return mapped(structure, placeholder)


def with_rooms(structure: Any, room: Any) -> Any:
    """Return a structure with memory in place of its placeholders: another structure's tensors, where they fit."""
    rooms = tensors_in(room)

    def received(leaf: Any) -> Any:
        if not isinstance(leaf, Placeholder):
            return leaf
        own = next(rooms, None)
        return own if own is not None and leaf.fits(own) else leaf.room()
    return mapped(structure, received)


def check_replicas(params: Mapping[str, Any] | Iterable[Any], process_set: ProcessSet = global_process_set) -> None:
    """Compare tensors over all ranks, bit by bit; all ranks call this with the same names.

    `DistributedOptimizer` does so by itself after every HVDLITE_REPLICA_CHECK_STEPS steps.

    Args:
        params: like `broadcast_parameters`.
        process_set: the ranks that are compared.

    Raises:
        ReplicaMismatchError: on all ranks, naming the first tensor that differs and the ranks.
    """
    named = [(name, on_host(tensor, name)) for name, tensor in _named(params)]
    runtime, process_set_id = api.runtime(), api.set_id(process_set)
    replicas.check_replicas(runtime, named, runtime.names.unnamed("torch", "check_replicas", process_set_id), process_set_id)


def broadcast_tensors(runtime: Runtime, tensors: Sequence[torch.Tensor], root_rank: int, name: str,
                      process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
    """Overwrite tensors with the root's, in place."""
    broadcast_each(runtime, [(tensor, root_rank) for tensor in tensors], name, process_set)


def broadcast_each(runtime: Runtime, tensors: Sequence[tuple[torch.Tensor, int]], name: str,
                   process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
    """Overwrite each tensor with that of its root, in place."""
    devices = runtime.devices
    dense = [cuda.to_transportable(contiguous(tensor, name), devices, Collective.BROADCAST) for tensor, _ in tensors]
    handles = [runtime.broadcast(f"{name}.{index}", as_runtime_array(tensor, name, devices), root,
                                 process_set=process_set)
               for index, (tensor, (_, root)) in enumerate(zip(dense, tensors, strict=True))]
    for (tensor, _), sent, handle in zip(tensors, dense, handles, strict=True):
        cuda.wait(handle)
        if tensor.data_ptr() != sent.data_ptr():
            tensor.copy_(sent)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return rank `root_rank`'s picklable object on every rank.

    Args:
        obj: picklable; that of the other ranks is ignored.
        root_rank: the rank whose object all get.
        name: the same on all ranks; unnamed calls are matched by their order.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: like every collective.
    """
    if api.is_provisional():
        return obj
    name = api.runtime().names.of_call("torch", "broadcast_object", name, api.set_id(process_set))
    return objects.broadcast_object(api.runtime(), obj, root_rank, name, api.set_id(process_set))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's picklable object, in rank order.

    Args:
        obj: picklable.
        name: the same on all ranks; unnamed calls are matched by their order.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: like every collective.
    """
    name = api.runtime().names.of_call("torch", "allgather_object", name, api.set_id(process_set))
    return objects.allgather_object(api.runtime(), obj, name, api.set_id(process_set))


def gather_tensors(runtime: Runtime, tensor: torch.Tensor, name: str, process_set: int) -> list[torch.Tensor]:
    """Return all ranks' tensors, in rank order, of any shapes and dtypes; they travel as bytes through host memory."""
    dense = contiguous(tensor.detach().cpu(), name)
    kind = tuple(dense.shape), str(dense.dtype).removeprefix("torch.")
    kinds = objects.allgather_object(runtime, kind, f"{name}.shapes", process_set)
    flat = as_array(dense.reshape(-1).view(torch.uint8), name)
    everything = runtime.allgather(name, flat, process_set=process_set).wait()
    dtypes = [getattr(torch, dtype) for _, dtype in kinds]
    sizes = [math.prod(shape) * dtype.itemsize for (shape, _), dtype in zip(kinds, dtypes, strict=True)]
    return [(part.clone().view(dtype) if part.numel() else torch.empty(0, dtype=dtype)).reshape(shape).to(tensor.device)
            for part, dtype, (shape, _) in zip(torch.from_numpy(everything).split(sizes), dtypes, kinds, strict=True)]


class Placeholder:
    """A placeholder for a tensor in a structure that is sent as an object.

    Strides are sent too: if an optimizer's state has other strides than its parameter, torch rounds 16-bit floats
    differently, and replicas would diverge.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.strides, self.device = dense_strides(tensor), tensor.device.type

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"

    def fits(self, room: torch.Tensor) -> bool:
        """Return whether the tensor can be received in the memory of another one."""
        return (room.layout is torch.strided and tuple(room.shape) == self.shape and room.device.type == self.device
                and str(room.dtype).removeprefix("torch.") == self.dtype and dense_strides(room) == self.strides)

    def room(self) -> torch.Tensor:
        """Return memory for the tensor."""
        room = torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=self.device)
        return room.as_strided(self.shape, self.strides) if self.strides else room


def _named(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        return [(name, value) for name, value in sorted(params.items()) if isinstance(value, torch.Tensor)]
    named = []
    for index, entry in enumerate(params if isinstance(params, Iterable) else [params]):
        name, value = entry if isinstance(entry, tuple) and len(entry) == 2 else (str(index), entry)
        if not isinstance(value, torch.Tensor):
            raise ValueError("tensors are given as a state_dict(), as named_parameters() or as a list, with no "
                             f"{type(value).__name__} in it (entry {name})")
        named.append((name, value))
    return named


leave_module_to_python(vars())


def broadcast_buffers(model: torch.nn.Module, root_rank: int = 0, process_set: ProcessSet = global_process_set, *,
                      every_forward: bool = False) -> RemovableHandle | None:
    """Give all ranks rank `root_rank`'s buffers of a model, now; all ranks of the process set call this together.

    Args:
        model: its buffers are sent, those of its modules too.
        root_rank: the rank whose values all get.
        process_set: the ranks that take part.
        every_forward: also do it from now on as `DistributedDataParallel(broadcast_buffers=True)` does: before the first
            forward pass, and before each one that follows a forward pass with gradients. All ranks must then make the same
            forward passes of this model (not of its parts). `no_sync()` of an optimizer changes nothing here. Copies and
            pickles of the model broadcast nothing.

    Returns:
        With `every_forward`: a handle, whose `remove()` ends that.

    Raises:
        UnsupportedError: for an unregistered process set.
        MismatchError: on all ranks, when a buffer's shape or dtype differs.
    """
    broadcast = BufferBroadcast(model, root_rank, process_set)
    broadcast()
    if not every_forward:
        return None
    uncompiled: Callable[[], None] = torch.compiler.disable(broadcast)
    is_due = True

    def before_forward() -> None:
        nonlocal is_due
        if is_due:
            uncompiled()
        is_due = torch.is_grad_enabled()
    return model.register_forward_pre_hook(ModuleHook(before_forward))


class ModuleHook:
    """A hook of one module, which calls a function; in copies and pickles of the module it does nothing."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __reduce__(self) -> Any:
        return ModuleHook, (_nothing,)

    def __call__(self, module: torch.nn.Module, argument: Any) -> None:
        self._function()


def _nothing() -> None:
    pass


class BufferBroadcast:
    """Overwrites a model's buffers with one rank's, whenever it is called.

    Buffers that DDP is told to ignore (`_ddp_params_and_buffers_to_ignore`) are left alone.
    """

    _runtime: Runtime | None = None  # of this world

    def __init__(self, model: torch.nn.Module, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
        self._model, self._root, self._process_set = model, root_rank, process_set
        runtime = api.attached_runtime()
        api.follow(self)
        if runtime is not None:
            self._attach(runtime, "torch.buffers")

    def _attach(self, runtime: Runtime, adapter: str) -> None:
        self._process_set_id = api.set_id(self._process_set)
        self._label = runtime.names.label(adapter, self._process_set_id)
        self._runtime = runtime

    def world_ended(self) -> None:
        """Let go of the runtime."""
        self._runtime = None

    def world_began(self, runtime: Runtime) -> None:
        """Broadcast among the ranks of another world from now on."""
        if self._process_set.process_set_id is not None:
            self._attach(runtime, "torch.buffers.earlier")  # only some ranks may have made it in an earlier world

    def __call__(self) -> None:
        runtime = self._runtime
        if runtime is None:  # this process joins an elastic job, whose buffers it gets with the other state
            return
        ignored = getattr(self._model, "_ddp_params_and_buffers_to_ignore", ())
        buffers = [buffer.detach() for name, buffer in self._model.named_buffers() if name not in ignored]
        members = runtime.members(self._process_set_id)
        if len(members) > 1 and runtime.world.rank in members and buffers:
            name = runtime.names.unnamed(self._label, "buffers", self._process_set_id)
            broadcast_tensors(runtime, buffers, self._root, name, self._process_set_id)


leave_module_to_python(vars())
