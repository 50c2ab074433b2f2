"""Collectives on torch tensors below autograd: arguments become arrays, and results become tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import api
from hvdlite.core.device import AnyArray
from hvdlite.core.process_set import ProcessSet
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.handle import Handle, Handles
from hvdlite_torch.arrays import cuda, tensors
from hvdlite_torch.arrays.tensors import as_tensor, contiguous


class TorchHandle:
    """A collective on a torch tensor in flight; pass it to `poll` and `synchronize`.

    On a GPU a collective is done when it is launched: the result is ready on the stream that is current at `wait`.
    """

    __slots__ = ("_finish", "_handle", "_result")

    def __init__(self, handle: Handle | Handles, finish: Callable[[Any], Any]) -> None:
        self._handle = handle
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of rows of each rank of the process set; of an allgather, after `wait`."""
        assert isinstance(self._handle, Handle)
        return self._handle.rows

    def done(self) -> bool:
        """Return whether `wait` would not block."""
        return self._handle.done()

    def wait(self) -> Any:
        """Wait and return the result tensor; may be called again."""
        array = cuda.wait(self._handle)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish(array)
        return self._result

    def then(self, change: Callable[[Any], Any]) -> TorchHandle:
        """Return a handle whose result is `change` of this one's."""
        return TorchHandle(self._handle, lambda _: change(self.wait()))


def allreduce(tensor: torch.Tensor, output: torch.Tensor, name: str, op: ReduceOp, prescale: float, postscale: float,
              process_set: ProcessSet, *, blocking: bool = False) -> TorchHandle:
    """Reduce into `output`, which may be `tensor`; `blocking` as in `Collectives`."""
    source = to_transportable(tensor, name, Collective.ALLREDUCE, op)
    target = source if output is tensor else contiguous_like(output, source)
    if output is tensor:
        mark_written(output)
    array = as_runtime_array(source, name)
    handle = api.runtime().allreduce(name, array, array if target is source else as_runtime_array(target, name), op,
                                     prescale=prescale, postscale=postscale, process_set=api.set_id(process_set),
                                     blocking=blocking)
    return TorchHandle(handle, lambda _: copy_back(output, target))


def grouped_allreduce(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str, op: ReduceOp,
                      prescale: float, postscale: float, process_set: ProcessSet) -> TorchHandle:
    """Like `allreduce`, of several tensors that are negotiated as one."""
    sources = [to_transportable(tensor, f"{name}[{index}]", Collective.ALLREDUCE, op) for index,
               tensor in enumerate(tensors)]
    targets = [source if output is tensor else contiguous_like(output, source)
               for tensor, output, source in zip(tensors, outputs, sources, strict=True)]
    for tensor, output in zip(tensors, outputs, strict=True):
        if output is tensor:
            mark_written(output)
    own = [as_runtime_array(target, name) for target in targets]
    given = [array if target is source else as_runtime_array(source, name)
             for source, target, array in zip(sources, targets, own, strict=True)]
    handle = api.runtime().grouped_allreduce(name, given, own, op, prescale=prescale, postscale=postscale,
                                             process_set=api.set_id(process_set))
    return TorchHandle(handle, lambda _: [copy_back(output, target) for output,
                                          target in zip(outputs, targets, strict=True)])


def allgather(tensor: torch.Tensor, name: str, process_set: ProcessSet, *, blocking: bool = False) -> TorchHandle:
    """Concatenate all ranks' rows; the handle's `rows` are their numbers by rank. `blocking` as in `Collectives`."""
    source = to_transportable(tensor, name, Collective.ALLGATHER)
    handle = api.runtime().allgather(name, as_runtime_array(source, name), process_set=api.set_id(process_set),
                                     blocking=blocking)
    return TorchHandle(handle, lambda array: as_tensor(array).to(tensor.device))


def reducescatter(tensor: torch.Tensor, name: str, op: ReduceOp, prescale: float, postscale: float,
                  process_set: ProcessSet, *, blocking: bool = False) -> TorchHandle:
    """Reduce, and return this rank's rows."""
    source = to_transportable(tensor, name, Collective.REDUCESCATTER, op)
    handle = api.runtime().reducescatter(name, as_runtime_array(source, name), op, prescale=prescale, postscale=postscale,
                                         process_set=api.set_id(process_set), blocking=blocking)
    return TorchHandle(handle, lambda array: as_tensor(array).to(tensor.device))


def alltoall(tensor: torch.Tensor, splits: list[int] | None, name: str, process_set: ProcessSet, *,
             blocking: bool = False) -> TorchHandle:
    """Exchange rows; the result is the pair of rows and their numbers by source rank."""
    source = to_transportable(tensor, name, Collective.ALLTOALL)
    handle = api.runtime().alltoall(name, as_runtime_array(source, name), splits, process_set=api.set_id(process_set),
                                    blocking=blocking)
    return TorchHandle(handle, lambda result: (as_tensor(result[0]).to(tensor.device),
                                               torch.from_numpy(result[1].astype("int32"))))


def join_handles(handles: Sequence[TorchHandle]) -> TorchHandle:
    """Return one handle for several."""
    return TorchHandle(Handles([handle._handle for handle in handles]), lambda _: [handle.wait() for handle in handles])


def broadcast(tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str, process_set: ProcessSet, *,
              blocking: bool = False) -> TorchHandle:
    """Write the root's values into `output`, which may be `tensor`."""
    source = to_transportable(tensor, name, Collective.BROADCAST)
    target = source if output is tensor else contiguous_like(output, source).copy_(source)
    if output is tensor:
        mark_written(output)
    return TorchHandle(api.runtime().broadcast(name, as_runtime_array(target, name), root_rank,
                                               process_set=api.set_id(process_set), blocking=blocking),
                       lambda _: copy_back(output, target))


def to_transportable(tensor: torch.Tensor, name: str, collective: Collective, op: ReduceOp | None = None) -> torch.Tensor:
    """Return a contiguous tensor in memory that a plane supports: a copy in host memory if the GPU plane does not."""
    dense = contiguous(tensor, name)
    return cuda.to_transportable(dense, api.runtime().devices, collective, op) if cuda.is_on_gpu(dense) else dense


def as_runtime_array(tensor: torch.Tensor, name: str) -> AnyArray:
    """Return the memory of a tensor from `to_transportable` as the runtime's array."""
    return tensors.as_runtime_array(tensor, name, api.runtime().devices)


def contiguous_like(tensor: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
    """Return memory for a result on the device of `source`: the tensor's own if it is contiguous."""
    detached = tensor.detach()
    if source is not None and cuda.is_on_gpu(source) != cuda.is_on_gpu(tensor):
        return cuda.empty_result_like(source)
    return detached if detached.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def copy_back(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy `target`'s values to `output`, unless they share memory; return `output`."""
    if output.data_ptr() != target.data_ptr() or not output.is_contiguous():
        with torch.no_grad():
            output.copy_(target)
    else:
        mark_written(output)
    return output


def mark_written(tensor: torch.Tensor) -> None:
    """Increment a tensor's version, so that a graph that has saved it raises in its backward pass.

    Called when a collective in place begins, and again when its result is complete.
    """
    torch.autograd.graph.increment_version(tensor)
