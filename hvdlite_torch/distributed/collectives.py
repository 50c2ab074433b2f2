"""The methods by which `torch.distributed` uses a process group, over a group; and the backend that torch finds in it.

They have the names and arguments of c10d's virtual methods. torch lets Python implement two classes that have them: the
process group (`process_group.py`), whose methods scripts call and which returns works of our own class; and, from torch 2.14
on, c10d's `Backend`. What torch's C++ calls on a backend comes there; it wraps the works, and the wrapper passes on `wait`
and `get_future` only.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch._C import _distributed_c10d as c10d
from torch.autograd import profiler

from hvdlite import api
from hvdlite.core.errors import OperationTimeoutError
from hvdlite.groups.call import Call
from hvdlite.groups.group import Group
from hvdlite_torch.distributed import tensors as memory
from hvdlite_torch.distributed.errors import ArgumentError, as_backend_error, missed
from hvdlite_torch.distributed.observers import begin_span
from hvdlite_torch.distributed.operations import MONITORED_BARRIER, Operations, Reduce, coalesced, sparse_text
from hvdlite_torch.distributed.registration import NAME
from hvdlite_torch.distributed.tensors import PreparedCall, joined
from hvdlite_torch.distributed.waits import BackwardWaits
from hvdlite_torch.distributed.work import GroupWork

if TYPE_CHECKING:
    _Backend: Any = object
else:
    _Backend = c10d.Backend

CAN_BE_BACKEND: Final = "rank" in (c10d.Backend.__init__.__doc__ or "")
"""Whether torch's `Backend` has a constructor, so that Python can derive from it."""
FAILING_SECONDS = 5.0
"""How long `shutdown` waits for operations under way while an exception is handled."""
_UNSET = datetime.timedelta()
_SUM = Reduce.of(torch.distributed.ReduceOp.SUM)


class C10dMethods:
    """Mixed into a class of torch. Lists of tensors are as in c10d: a list of one tensor, or of one list of tensors."""

    _group: Group
    _operations: Operations
    _waits: BackwardWaits
    _done: GroupWork  # of every blocking call that has succeeded: nobody asks it for more than that
    _calls: int  # collectives begun
    _coalesced: tuple[list[Call], list[torch.Tensor]] | None  # the calls since `_begin_coalescing`, and their results

    def attach(self, group: Group) -> None:
        """Set the group that carries out the calls."""
        self._group, self._operations = group, Operations(group.rank, group.size)
        self._calls, self._coalesced = 0, None
        self._done = GroupWork(group, (), [])
        self._waits = BackwardWaits()

    # --- what torch asks a backend ------------------------------------------------------------------------------------

    supports_coalescing = False
    supports_shrinking = False

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME

    def get_error(self) -> Any:
        """Return that there is no error: those of operations are raised by their work."""
        return c10d.ErrorType.SUCCESS

    # --- collectives --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """See `torch.distributed.all_reduce`; sparse tensors too."""
        tensor = _only(tensors, "all_reduce")
        if tensor.layout is not torch.strided:
            return self.allreduce_sparse(tensors, opts)
        return self._start(self._operations.allreduce(tensors, _reduce(opts)), opts)

    def allreduce_sparse(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Sum a sparse tensor; it waits for the other ranks' numbers of values."""
        (tensor,) = tensors
        self._group.start((), blocking=True)  # operations under way may change the tensor
        counts = [torch.empty(1, dtype=torch.int64) for _ in range(self._group.size)]
        own = coalesced(tensor, _reduce(opts))
        prepared = self._operations.allgather(counts, torch.tensor([own._nnz()]), sparse_text(own))
        self._calls += 1
        call = self._group.start(prepared.operations, prepared.finish, blocking=True, timeout=_timeout(opts))
        GroupWork(self._group, [call], []).wait()
        return self._start(self._operations.sparse_sum(tensor, own, [int(count) for count in counts]), opts)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Like `allreduce`, of several tensors."""
        return self._start(self._operations.allreduce(tensors, _reduce(opts)), opts)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """See `torch.distributed.broadcast`."""
        tensor = _only(tensors, "broadcast")
        return self._start(self._operations.broadcast(tensor, self._root(opts, "broadcast")), opts)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """See `torch.distributed.reduce`."""
        tensor = _only(tensors, "reduce")
        return self._start(self._operations.reduce(tensor, self._root(opts, "reduce"), _reduce(opts)), opts)

    def allgather(self, output_tensors: Sequence[Sequence[torch.Tensor]], input_tensors: Sequence[torch.Tensor],
                  opts: Any = None) -> Any:
        """See `torch.distributed.all_gather`; the tensors of different ranks may differ in size."""
        outputs, own = _only(output_tensors, "all_gather"), _only(input_tensors, "all_gather")
        return self._start(self._operations.allgather(outputs, own), opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """See `torch.distributed.all_gather_into_tensor`."""
        return self._start(self._operations.allgather_single(output, input), opts)

    def allgather_coalesced(self, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor],
                            opts: Any = None) -> Any:
        """Gather several tensors of each rank; one list of outputs for each rank."""
        if any(len(outputs) != len(input_list) for outputs in output_lists):
            raise ArgumentError("all_gather_coalesced: each rank's list of outputs must have one tensor for each of the "
                                f"{len(input_list)} inputs; they have {[len(outputs) for outputs in output_lists]}")
        return self._start(_joined([self._operations.allgather([outputs[index] for outputs in output_lists], own)
                                    for index, own in enumerate(input_list)]), opts)

    def all_gather_single_coalesced(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
                                    opts: Any = None) -> Any:
        """Like `all_gather_single`, of several tensors."""
        return self._start(_joined([self._operations.allgather_single(output, own)
                                    for output, own in _pairs(outputs, inputs, "all_gather_single_coalesced")]), opts)

    def gather(self, output_tensors: Sequence[Sequence[torch.Tensor]], input_tensors: Sequence[torch.Tensor],
               opts: Any) -> Any:
        """See `torch.distributed.gather`; `output_tensors` is empty on other ranks than the root."""
        own = _only(input_tensors, "gather")
        outputs = output_tensors[0] if output_tensors else None
        return self._start(self._operations.gather(outputs, own, self._root(opts, "gather")), opts)

    def scatter(self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[Sequence[torch.Tensor]],
                opts: Any) -> Any:
        """See `torch.distributed.scatter`; `input_tensors` is empty on other ranks than the root."""
        output = _only(output_tensors, "scatter")
        inputs = input_tensors[0] if input_tensors else None
        return self._start(self._operations.scatter(output, inputs, self._root(opts, "scatter")), opts)

    def reduce_scatter(self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[Sequence[torch.Tensor]],
                       opts: Any = None) -> Any:
        """See `torch.distributed.reduce_scatter`; the tensors of different ranks may differ in size."""
        output, inputs = _only(output_tensors, "reduce_scatter"), _only(input_tensors, "reduce_scatter")
        return self._start(self._operations.reduce_scatter(output, inputs, _reduce(opts)), opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """See `torch.distributed.reduce_scatter_tensor`."""
        return self._start(self._operations.reduce_scatter_single(output, input, _reduce(opts)), opts)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
                                        opts: Any = None) -> Any:
        """Like `reduce_scatter_single`, of several tensors."""
        reduce = _reduce(opts)
        return self._start(_joined([self._operations.reduce_scatter_single(output, own, reduce) for output, own
                                    in _pairs(outputs, inputs, "reduce_scatter_single_coalesced")]), opts)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int],
                          input_split_sizes: Sequence[int], opts: Any = None) -> Any:
        """See `torch.distributed.all_to_all_single`."""
        return self._start(self._operations.alltoall_single(output, input, output_split_sizes, input_split_sizes), opts)

    def alltoall(self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor],
                 opts: Any = None) -> Any:
        """See `torch.distributed.all_to_all`."""
        return self._start(self._operations.alltoall(output_tensors, input_tensors), opts)

    def barrier(self, opts: Any = None) -> Any:
        """See `torch.distributed.barrier`."""
        return self._start(self._operations.barrier(), opts)

    # --- sends and receives -------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst_rank: int, tag: int) -> Any:
        """See `torch.distributed.isend`."""
        tensor = _only(tensors, "send")
        memory.check(tensor, "send")
        self._check_rank(dst_rank, "send", "destination")
        _check_tag(tag)
        return self._message("send", self._group.send(memory.memory(memory.dense(tensor)), dst_rank, tag), tensor)

    def recv(self, tensors: Sequence[torch.Tensor], src_rank: int, tag: int) -> Any:
        """See `torch.distributed.irecv`."""
        self._check_rank(src_rank, "recv", "source")
        return self._receive(tensors, src_rank, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Any:
        """Receive from the rank that has sent first; `Work.source_rank` returns which one that was."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Sequence[torch.Tensor], source: int | None, tag: int) -> Any:
        tensor = _only(tensors, "recv")
        memory.check(tensor, "recv")
        _check_tag(tag)
        if not memory.is_plain(tensor):
            raise ArgumentError("recv: Tensors must be contiguous: this one has the shape "
                                f"{tuple(tensor.shape)} and the strides {tensor.stride()}")
        return self._message("recv", self._group.receive(memory.memory(tensor), source, tag), tensor)

    def _message(self, name: str, call: Call, tensor: torch.Tensor) -> Any:
        if profiler._is_profiler_enabled:
            call.when_done(begin_span(name))
        return self._began(call, [tensor])

    # --- the group ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group when the collectives and sends under way are over; what takes longer than the timeout fails.

        While an exception is handled, only a few seconds are given to them: other ranks may never make the same calls.
        """
        api.begin_to_leave()
        self._group.drain(self._group.timeout if sys.exc_info()[0] is None else FAILING_SECONDS)
        self._group.close()

    def abort(self) -> None:
        """Fail all operations under way on this rank, and leave the group."""
        self._group.abort("abort() was called")
        self._group.close()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time after which operations fail from now on."""
        self._group.timeout = timeout.total_seconds()

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _set_sequence_number_for_group(self) -> None:
        pass  # calls are counted from the beginning

    def _run_monitored_barrier(self, timeout: datetime.timedelta | None, wait_all_ranks: bool) -> None:
        """Wait for all ranks; raise an error that names those that do not come in time."""
        seconds = timeout.total_seconds() if timeout is not None and timeout >= _UNSET else self._group.timeout
        self._calls += 1
        call = self._group.start([MONITORED_BARRIER], blocking=True, timeout=seconds)
        if isinstance(call.error, OperationTimeoutError) and call.error.ranks:
            raise missed(call.error, self._group, seconds, all_ranks=wait_all_ranks)
        if call.error is not None:
            raise as_backend_error(call.error)

    # ------------------------------------------------------------------------------------------------------------------

    def _start(self, prepared: PreparedCall, opts: Any) -> Any:
        """Start operations; return their work."""
        self._calls += 1
        is_blocking = opts is not None and not getattr(opts, "asyncOp", True)
        span = begin_span(prepared.operations[0].agreed) if profiler._is_profiler_enabled and prepared.operations else None
        call = self._group.start(prepared.operations, prepared.finish, blocking=is_blocking, timeout=_timeout(opts))
        if span is not None:
            call.when_done(span)
        if is_blocking and call.is_done and call.error is None:
            return self._done
        self._waits.begun(call)
        return self._began(call, prepared.tensors)

    def _began(self, call: Call, tensors: list[torch.Tensor]) -> GroupWork:
        if self._coalesced is not None:
            self._coalesced[0].append(call)
            self._coalesced[1].extend(tensors)
        return GroupWork(self._group, (call,), tensors)

    def _begin_coalescing(self) -> None:
        self._coalesced = [], []

    def _finish_coalescing(self) -> GroupWork:
        (calls, tensors), self._coalesced = self._coalesced or ([], []), None
        return GroupWork(self._group, calls, tensors)

    def _root(self, opts: Any, name: str) -> int:
        root = int(opts.rootRank)
        self._check_rank(root, name, "root")
        return root

    def _check_rank(self, rank: int, name: str, what: str) -> None:
        if not 0 <= rank < self._group.size:
            raise ArgumentError(f"{name}: invalid {what} rank: {rank} is not in 0..{self._group.size - 1}, the ranks here")


class HvdliteBackend(C10dMethods, _Backend):  # type: ignore[misc]
    """Implements c10d's `Backend` for host memory; torch keeps the backends of other devices beside it.

    Args:
        group: carries out the calls.
        timeout: of operations.
    """

    supports_splitting = True  # by the process group: torch never asks the backend to

    def __init__(self, group: Group, timeout: datetime.timedelta) -> None:
        super().__init__(group.rank, group.size)
        self.attach(group)
        options: Any = c10d.Backend.Options(NAME, timeout)
        options.group_name = group.name
        self._options = options

    @property
    def options(self) -> Any:
        """The backend's options, with which torch makes parts of the group."""
        return self._options

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time after which operations fail from now on."""
        super().set_timeout(timeout)
        self._options._timeout = timeout

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """See `hvdlite_torch.distributed.monitored_barrier`."""
        self._run_monitored_barrier(opts.timeout, wait_all_ranks)

    def start_coalescing(self) -> None:
        """Begin to collect works."""
        self._begin_coalescing()

    def end_coalescing(self) -> GroupWork:
        """Return the works since `start_coalescing` as one."""
        return self._finish_coalescing()

    def eager_connect_single_device(self, device: Any) -> None:
        """Do nothing: the ranks are connected."""


T = TypeVar("T")


def _only(tensors: Sequence[T], name: str) -> T:
    """Return the only tensor, or list of tensors, of a call.

    c10d's lists were made for several GPUs of a rank; Gloo reduces or copies several tensors among themselves.
    """
    if len(tensors) != 1:
        raise ArgumentError(f"{name}: takes one tensor of each rank, not {len(tensors)}; the coalesced forms take "
                            "several")
    return tensors[0]


def _check_tag(tag: int) -> None:
    if tag < 0:
        raise ArgumentError(f"Tag must be nonnegative, not {tag}")


def _reduce(opts: Any) -> Reduce:
    return _SUM if opts is None else Reduce.of(opts.reduceOp)


def _timeout(opts: Any) -> float | None:
    """Return the timeout that was set for a call, in seconds."""
    timeout = getattr(opts, "timeout", _UNSET)
    return timeout.total_seconds() if timeout > _UNSET else None


def _joined(calls: Sequence[PreparedCall]) -> PreparedCall:
    return joined(calls, [tensor for each in calls for tensor in each.tensors])


def _pairs(outputs: Sequence[Any], inputs: Sequence[torch.Tensor], name: str) -> Sequence[tuple[Any, torch.Tensor]]:
    if len(outputs) != len(inputs):
        raise ArgumentError(f"{name}: {len(outputs)} outputs for {len(inputs)} inputs; there must be as many")
    return list(zip(outputs, inputs, strict=True))
