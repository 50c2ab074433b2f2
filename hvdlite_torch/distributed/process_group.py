"""The process group: torch lets Python implement a whole `ProcessGroup`, and uses it instead of one of its own.

Before torch 2.14, Python cannot implement a backend of a process group; the process group then answers for it.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import _distributed_c10d as c10d
from torch._C import _len_torch_dispatch_stack
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map_only

from hvdlite.groups.group import Group
from hvdlite_torch.distributed import observers
from hvdlite_torch.distributed.collectives import CAN_BE_BACKEND, C10dMethods, HvdliteBackend
from hvdlite_torch.distributed.errors import UnsupportedArgumentError
from hvdlite_torch.distributed.fr_trace import GroupRecord
from hvdlite_torch.distributed.registration import NAME
from hvdlite_torch.distributed.work import GroupWork
from hvdlite_torch.uncompiled import leave_to_python

if TYPE_CHECKING:
    _ProcessGroup: Any = object
else:
    _ProcessGroup = torch.distributed.ProcessGroup

_CPU: Final = torch.device("cpu")
_SUM: Final = c10d.ReduceOp.SUM
_Arguments = tuple[Any, ...]
_Timeout = datetime.timedelta | None


class HvdliteProcessGroup(C10dMethods, _ProcessGroup):  # type: ignore[misc]
    """Implements `torch.distributed.ProcessGroup`, and answers for the backend that torch looks for in one.

    Tensors on another device go to the backend that the script has named for it ("cpu:hvdlite,cuda:nccl"), which is made
    when it is first needed.

    Args:
        group: carries out the calls.
        store: the group's.
        name: under which torch registers the group.
        timeout: of operations.
        join: makes a group of some of its ranks: from a store, a name, a rank, the ranks of this group, and a timeout.
    """

    def __init__(self, group: Group, store: Any, name: str, timeout: datetime.timedelta,
                 join: Callable[..., HvdliteProcessGroup]) -> None:
        super().__init__(group.rank, group.size)  # the constructor with a store is not for classes of Python
        self.attach(group)
        self._store, self._timeout, self._join = store, timeout, join
        self._other_backends: dict[str, Any] = {}  # by type of device
        self._group_name, self._group_desc = name, ""
        self._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)
        self._backend: Any = self
        if CAN_BE_BACKEND:
            self._backend = HvdliteBackend(group, timeout)
            self._register_backend(_CPU, c10d.ProcessGroup.BackendType.CUSTOM, self._backend)

    # --- names, which C++ asks for --------------------------------------------------------------------------------

    def getRank(self) -> int:
        """Return this process's rank in the group."""
        return self._group.rank

    def getSize(self) -> int:
        """Return the number of ranks."""
        return self._group.size

    def getGroupName(self) -> str:
        """Return the name under which torch has registered the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Set the name under which torch has registered the group."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """Return the description that the script has given the group."""
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:
        """Set the description that the script has given the group, which errors and reports show."""
        self._group_desc = description

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    def get_group_store(self) -> Any:
        """Return the group's store."""
        return self._store

    # --- what torch asks the backend of a group, which is the group itself before torch 2.14 -----------------------

    supports_splitting = False
    supports_time_estimate = False

    @property
    def options(self) -> Any:
        """The options of a backend: its name and timeout."""
        return c10d.Backend.Options(NAME, self._timeout)

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend for a device."""
        other = None if device.type == "cpu" else self._backend_for(device.type)
        return self._backend if other is None else other

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, *map(torch.device, _named_backends(self))]

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        pass

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `hvdlite_torch.distributed.monitored_barrier`."""
        self._run_monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._begin_coalescing()
        else:
            self._backend_for(device.type)
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        return self._finish_coalescing() if device.type == "cpu" else super()._end_coalescing(device)

    def record(self) -> GroupRecord:
        """Return what this rank remembers of the group."""
        group = self._group
        return GroupRecord(self._group_name, self._group_desc, [int(member) for member in group.members], group.timeout,
                           group.past_calls())

    # --- the end, and parts ----------------------------------------------------------------------------------------

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time after which operations fail from now on."""
        self._timeout = timeout
        super().set_timeout(timeout)
        if self._backend is not self:
            self._backend.set_timeout(timeout)  # torch reads its options
        for other in self._other_backends.values():
            other.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group; see `C10dMethods.shutdown`."""
        super().shutdown()
        for other in self._other_backends.values():
            other.shutdown()

    def abort(self) -> None:
        """Fail all operations under way on this rank, and leave the group."""
        super().abort()
        for other in self._other_backends.values():
            other.abort()

    def split_group(self, new_ranks: Sequence[int], timeout: datetime.timedelta | None = None, opts: Any = None,
                    group_name: str | None = None, group_desc: str | None = None,
                    device_types: Any = None) -> HvdliteProcessGroup | None:
        """Make a group of some of this group's ranks; all of those call it. Return None on other ranks.

        Args:
            new_ranks: indices in this group, in the order of the ranks of the new one.
            timeout: of its operations; this group's without one.
            opts: ignored, as are `device_types`.
            group_name: for torch's registry; distinct for each group of these ranks.
            group_desc: for errors and reports.
        """
        ranks = list(new_ranks)
        if self._group.rank not in ranks:
            return None
        name = group_name or f"{self._group_name}:split:{','.join(map(str, ranks))}"
        store = c10d.PrefixStore(f"{name}/", self.get_group_store())
        part = self._join(store, name, ranks.index(self._group.rank), ranks, timeout or self._timeout)
        part._set_group_name(name)
        part._set_group_desc(group_desc or "")
        return part

    splitGroup = split_group

    def _backend_for(self, device: str) -> Any:
        """Return the backend that the script has named for another device; None without one."""
        name = _named_backends(self).get(device)
        if name is not None and device not in self._other_backends:
            made, kind = _made_backend(name, device, self, self._timeout)
            self._register_backend(torch.device(device), kind, made)
            self._other_backends[device] = made
        return self._other_backends.get(device)


# --- backends of other devices: "cpu:hvdlite,cuda:nccl" ----------------------------------------------------------------
# Before 2.14, torch makes no other backend for a group that Python implements, so they are made here.


def _named_backends(group: Any) -> dict[str, str]:
    """Return the backends that the script has named for a group, by type of device, without this one."""
    config = distributed_c10d._world.pg_backend_config.get(group, "")
    pairs = [each.split(":") for each in config.split(",") if ":" in each]
    return {device: backend for device, backend in pairs if backend != NAME}


def _made_backend(name: str, device: str, group: Any, timeout: datetime.timedelta) -> tuple[Any, Any]:
    """Make a backend as torch does; return it and its type.

    Raises:
        UnsupportedArgumentError: for a backend that cannot be made here.
    """
    prefix = distributed_c10d._world.pg_map[group][1]
    store, rank, size = c10d.PrefixStore(f"{device}/", prefix), group.rank(), group.size()
    ranks = list(distributed_c10d._world.pg_group_ranks.get(group, range(size)))
    if name in ("nccl", "xccl"):
        kind: Any = getattr(c10d, f"ProcessGroup{name.upper()}", None)
        if kind is None:
            raise UnsupportedArgumentError(f'backend "{name}" for {device}: this torch ({torch.__version__}) was built '
                                           "without it; install one for this device, or name another backend")
        options = kind.Options()
        options._timeout, options.global_ranks_in_group, options.group_name = timeout, ranks, group.group_name
        return kind(store, rank, size, options), getattr(c10d.ProcessGroup.BackendType, name.upper())
    if name == "gloo":
        return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout), c10d.ProcessGroup.BackendType.GLOO
    plugin = torch.distributed.Backend._plugins.get(name.upper())
    if plugin is None:
        raise UnsupportedArgumentError(f'backend "{name}" for {device} cannot be used beside hvdlite on torch '
                                       f"{torch.__version__}: only nccl, xccl, gloo and backends that are registered")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout), c10d.ProcessGroup.BackendType.CUSTOM
    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
    options.group_id, options.global_ranks_in_group = group.group_name, ranks
    return plugin.creator_fn(options, None), c10d.ProcessGroup.BackendType.CUSTOM


def records() -> list[GroupRecord]:
    """Return what this rank remembers of its process groups of hvdlite."""
    groups = list(distributed_c10d._world.pg_map)
    return [group.record() for group in groups if isinstance(group, HvdliteProcessGroup)]


def _first_tensor(argument: Any) -> torch.Tensor | None:
    """Return a tensor of an argument, which may be a list, or a list of lists."""
    while isinstance(argument, (list, tuple)) and argument:
        argument = argument[0]
    return argument if isinstance(argument, torch.Tensor) else None


def _waited(args: Sequence[Any]) -> Sequence[Any] | None:
    """Return arguments whose tensors are results of functional collectives, when those are over; None without any."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    pending = [each for each in tree_leaves(args) if isinstance(each, AsyncCollectiveTensor)]
    return tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.trigger_wait, args) if pending else None


# --- the short forms of methods, such as `group.allreduce(tensor, op)`, as the form with options ------------------------
# torch's C++ has them for its own process groups; those that Python implements get them here.


def _options(kind: Any, timeout: _Timeout, **fields: Any) -> Any:
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    if timeout is not None:
        options.timeout = timeout
    return options


def _listed(given: Any) -> Sequence[Any]:
    return [given] if isinstance(given, torch.Tensor) else given


def _broadcast(tensor: Any, root: int = 0, timeout: _Timeout = None) -> _Arguments:
    return _listed(tensor), _options(c10d.BroadcastOptions, timeout, rootRank=root)


def _allreduce(tensor: Any = None, op: Any = _SUM, timeout: _Timeout = None, *, tensors: Any = None) -> _Arguments:
    return _listed(tensors if tensor is None else tensor), _options(c10d.AllreduceOptions, timeout, reduceOp=op)


def _reduce(tensor: Any, root: int = 0, op: Any = _SUM, timeout: _Timeout = None) -> _Arguments:
    return _listed(tensor), _options(c10d.ReduceOptions, timeout, rootRank=root, reduceOp=op)


def _allgather(output_tensors: Any, input_tensor: Any, timeout: _Timeout = None) -> _Arguments:
    is_short = isinstance(input_tensor, torch.Tensor)
    return ([output_tensors] if is_short else output_tensors, _listed(input_tensor),
            _options(c10d.AllgatherOptions, timeout))


def _gather(output_tensors: Any, input_tensor: torch.Tensor, root: int, timeout: _Timeout = None) -> _Arguments:
    return ([output_tensors] if output_tensors else []), [input_tensor], _options(c10d.GatherOptions, timeout, rootRank=root)


def _scatter(output_tensor: torch.Tensor, input_tensors: Any, root: int, timeout: _Timeout = None) -> _Arguments:
    return [output_tensor], ([input_tensors] if input_tensors else []), _options(c10d.ScatterOptions, timeout, rootRank=root)


def _reduce_scatter(output: Any, input: Any, op: Any = _SUM, timeout: _Timeout = None) -> _Arguments:
    is_short = isinstance(output, torch.Tensor)
    return _listed(output), [input] if is_short else input, _options(c10d.ReduceScatterOptions, timeout, reduceOp=op)


def _all_to_all_single(output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int],
                       input_split_sizes: Sequence[int], timeout: _Timeout = None) -> _Arguments:
    return output, input, output_split_sizes, input_split_sizes, _options(c10d.AllToAllOptions, timeout)


def _alltoall(output_tensors: Any, input_tensors: Any, timeout: _Timeout = None) -> _Arguments:
    return output_tensors, input_tensors, _options(c10d.AllToAllOptions, timeout)


def _barrier(timeout: _Timeout = None) -> _Arguments:
    return (_options(c10d.BarrierOptions, timeout),)


_SHORT_FORMS: Final[dict[str, Callable[..., _Arguments]]] = {
    "broadcast": _broadcast, "allreduce": _allreduce, "reduce": _reduce, "allgather": _allgather, "gather": _gather,
    "scatter": _scatter, "reduce_scatter": _reduce_scatter, "all_to_all_single": _all_to_all_single, "alltoall": _alltoall,
    "barrier": _barrier,
}
"""By method: the function that makes the arguments of the form with options from those of a short form."""


# --- the methods ------------------------------------------------------------------------------------------------------


def _method(own_name: str, name: str) -> Callable[..., Any]:
    """Return a method that accepts all forms of c10d's, and passes tensors on another device to its backend.

    Args:
        own_name: of the method of `C10dMethods`.
        name: of the method of torch.
    """
    own, elsewhere, with_options = getattr(C10dMethods, own_name), getattr(_ProcessGroup, name), _SHORT_FORMS.get(own_name)
    operator = _OLD_NAMES.get(own_name, own_name)

    def method(self: HvdliteProcessGroup, *args: Any, **kwargs: Any) -> Any:
        for argument in args:
            tensor = _first_tensor(argument)
            if tensor is not None:
                if not tensor.is_cpu and self._backend_for(tensor.device.type) is not None:
                    return elsewhere(self, *args, **kwargs)
                break
        if _len_torch_dispatch_stack():
            observers.count(operator)
        has_options = (args and type(args[-1]) in _OPTIONS) or "opts" in kwargs
        if with_options is not None and not has_options:
            args, kwargs = with_options(*args, **kwargs), {}
        try:
            return own(self, *args, **kwargs)
        except UnsupportedArgumentError:
            waited = _waited(args)
            if waited is None:
                raise
        return own(self, *waited, **kwargs)

    functools.update_wrapper(method, own)
    return leave_to_python(method)


_OPTIONS: Final = frozenset(kind for name, kind in vars(c10d).items() if name.endswith("Options"))
_OLD_NAMES: Final = {
    "all_gather_single": "_allgather_base", "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base", "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names of methods, and the names that torch had for them up to 2.12."""
for _name in ("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "allgather_coalesced", "gather",
              "scatter", "reduce_scatter", "alltoall", "send", "recv", "recv_anysource", "barrier", *_OLD_NAMES):
    for _known in (_name, _OLD_NAMES.get(_name, _name)):
        if hasattr(_ProcessGroup, _known):
            setattr(HvdliteProcessGroup, _known, _method(_name, _known))
