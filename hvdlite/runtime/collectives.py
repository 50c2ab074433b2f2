"""The collectives of the runtime: each call is checked, and becomes an entry in the inbox."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from hvdlite.core.array import Array, flat
from hvdlite.core.device import CPU, AnyArray, device_of
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.texts import encodable
from hvdlite.core.types import ROOTED, Collective, ReduceOp
from hvdlite.core.world import World
from hvdlite.handoff.entry import Entry, NotifyingEntry
from hvdlite.handoff.exchange import MailboxCall, Signature
from hvdlite.handoff.handle import Handle, Handles
from hvdlite.handoff.handoff import Handoff
from hvdlite.negotiation.mailboxes import stem_and_number
from hvdlite.negotiation.messages import Request, Wait
from hvdlite.negotiation.process_sets import pair_set_id
from hvdlite.runtime.arguments import check_rows, check_writeable, reducible, transportable

_NOTHING: Final[Array] = np.empty(0, np.uint8)


class Collectives:
    """The collectives of one rank on NumPy arrays, and on GPUs' memory. Callable from any thread.

    Every call checks its arguments and returns a `Handle` without blocking, but for those with `blocking=True`: their
    callers wait immediately, so these calls may block, and return a handle that is done. The arrays must be C-contiguous,
    stay alive and not be written until the handle is done; on a GPU, until what follows the handle's completion.

    Args:
        eager_limit: bytes; smaller tensors are sent along with their requests.
        blocking_limit: likewise for allreduces whose caller blocks.

    Attributes:
        exchanged: the values that this rank has given to collectives, apart from gradient sets.
    """

    def __init__(self, world: World, handoff: Handoff, eager_limit: int, blocking_limit: int) -> None:
        self._world, self._inbox, self._waiters, self._state = world, handoff.inbox, handoff.waiters, handoff.state
        self._mailboxes = handoff.mailboxes
        self._eager_limit, self._blocking_limit = eager_limit, blocking_limit
        self.exchanged = 0

    def members(self, process_set: int) -> tuple[int, ...]:
        """Return the ranks of a process set, ascending.

        Raises:
            UnsupportedError: when there is no such set (any more).
        """
        if process_set not in self._state.process_sets:
            raise UnsupportedError(f"there is no process set {process_set}; it was removed, or never added")
        return self._state.process_sets[process_set]

    def process_set_of(self, ranks: Sequence[int]) -> int | None:
        """Return the id of the process set of these ranks; None where there is none."""
        return self._state.process_sets.find(ranks)

    def allreduce(self, name: str, source: AnyArray | None, output: AnyArray, op: ReduceOp, *, prescale: float = 1.0,
                  postscale: float = 1.0, process_set: int = GLOBAL_PROCESS_SET_ID, at_once: bool = True,
                  blocking: bool = False) -> Handle:
        """Reduce over all ranks of a process set into `output`.

        Args:
            source: this rank's values, of `output`'s shape and dtype, possibly the same memory; None when this rank has
                nothing to contribute: it then counts as zeros for Sum and Average, which still divides by the set's
                size. When nobody contributes, `output` is untouched and `handle.contributors` is empty.
            op: AVERAGE, SUM, PRODUCT, MIN, MAX or ADASUM (`planes.adasum`). Integer averages are truncated toward zero;
                16-bit floats are accumulated in float32.
            prescale: factor on every rank's values before the reduction.
            postscale: factor on the result.
            process_set: id of the ranks that take part.
            at_once: False lets the call travel together with the next one, or when this rank waits for something.
            blocking: see the class.

        Raises:
            UnsupportedError: for a dtype or op that cannot be served, arrays that do not match, or a process set that this
                rank is not in.
            DuplicateNameError: when `name` is still being processed in this set on this rank.
        """
        op = ReduceOp(op)
        dtype, prescale, postscale = reducible(name, source, output, op), float(prescale), float(postscale)
        check_writeable(name, output)
        self.exchanged += output.size

        def entry() -> Entry:
            request = Request(name, Collective.ALLREDUCE, dtype, output.shape, op=op, prescale=prescale, postscale=postscale,
                              absent=source is None, process_set_id=process_set,
                              payload=self._payload(source, blocking=blocking),
                              device=device_of(output), blocking=blocking)
            return Entry(request, *_memory(source, output), output, self._waiters)

        if blocking and self._mailboxes and type(source) is type(output) is np.ndarray:
            stem, number = stem_and_number(name)
            handle = self._exchange(stem, MailboxCall(
                (process_set, name), Signature(stem, Collective.ALLREDUCE, dtype, output.shape, op, prescale, postscale),
                number, flat(source), flat(output), entry, output))
            if handle is not None:
                return handle
        self._check_member(name, process_set)
        return self._inbox.enqueue(entry(), at_once=at_once)

    def _exchange(self, stem: str, call: MailboxCall) -> Handle | None:
        """Carry out a call in the mailbox of its stem, or enqueue it if that does not take it; None if there is none."""
        mailbox = self._mailboxes.get((call.key[0], stem))
        if mailbox is None:
            return None
        inbox, progress = self._inbox, self._waiters.progress
        inbox.reserve(call.key)
        inbox.last_caller = threading.get_ident()
        if not mailbox.exchange(call, progress.block, progress.unblock):
            call.entry = call.make_entry()
            inbox.put(call.entry)
        if call.entry is not None:
            return call.entry.handle
        handle = Handle.finished(call.key[1], self._waiters, Wait(*call.key), call.result, mailbox.members)
        handle.rows = call.rows
        return handle

    def _start(self, request: Request, source: AnyArray | None, *, in_place: bool = False) -> Handle:
        """Carry out a request in a mailbox if its caller blocks and there is one; else enqueue it.

        Args:
            in_place: whether the result goes to `source`; else it becomes a new array, or there is none.
        """
        output = source if in_place else None
        self.exchanged += 0 if source is None else source.size

        def entry() -> Entry:
            sources: list[AnyArray | None] = [] if source is None else [source]
            return Entry(request, sources, sources if in_place else [], output, self._waiters)

        if request.blocking and self._mailboxes and (source is None or type(source) is np.ndarray):
            cut = request.collective in (Collective.ALLGATHER, Collective.ALLTOALL)
            root = -1 if request.root_rank < 0 else self.members(request.process_set_id).index(request.root_rank)
            stem, number = stem_and_number(request.name)
            signature = Signature(stem, request.collective, request.dtype, request.shape[cut:], request.op,
                                  request.prescale, request.postscale, root)
            values = _NOTHING if source is None else flat(source)
            handle = self._exchange(stem, MailboxCall(
                (request.process_set_id, request.name), signature, number, values, None, entry, output,
                request.shape[:1] if cut else (), request.splits))
            if handle is not None:
                return handle
        return self._inbox.enqueue(entry())

    def grouped_allreduce(self, name: str, sources: Sequence[AnyArray], outputs: Sequence[AnyArray], op: ReduceOp, *,
                          prescale: float = 1.0, postscale: float = 1.0,
                          process_set: int = GLOBAL_PROCESS_SET_ID) -> Handles:
        """Like `allreduce`, of several arrays that are negotiated and answered as one; the result is `outputs`.

        Args:
            sources: the same number of arrays, of the same shapes, on all ranks. Of several dtypes, or on the host and
                on a GPU, they are as many groups.
        """
        op = ReduceOp(op)
        groups: dict[tuple[str, str], tuple[list[AnyArray], list[AnyArray]]] = {}
        for index, (source, output) in enumerate(zip(sources, outputs, strict=True)):
            group = groups.setdefault((reducible(f"{name}[{index}]", source, output, op), device_of(output)), ([], []))
            group[0].append(source)
            group[1].append(output)
            self.exchanged += output.size
        handles = []
        for (dtype, device), (given, own) in groups.items():
            part = name if len(groups) == 1 else f"{name}.{dtype}" if device == CPU else f"{name}.{dtype}.{device}"
            request = self.request(part, Collective.ALLREDUCE, dtype,
                                   (sum(output.size for output in own),), op=op, prescale=float(prescale),
                                   postscale=float(postscale), group=tuple(output.shape for output in own),
                                   process_set=process_set, device=device)
            handles.append(self._inbox.enqueue(Entry(request, given, own, own, self._waiters)))
        return Handles(handles, outputs)

    def reduce(self, name: str, source: AnyArray, output: AnyArray | None, root_rank: int, op: ReduceOp, *,
               prescale: float = 1.0, postscale: float = 1.0, process_set: int = GLOBAL_PROCESS_SET_ID) -> Handle:
        """Like `allreduce`, but only rank `root_rank` gets the result; the others pass no `output` and get None.

        Raises:
            UnsupportedError: like `allreduce`, and for a root that is not in the set.
        """
        op = ReduceOp(op)
        dtype = reducible(name, source, source if output is None else output, op)
        request = self.request(name, Collective.REDUCE, dtype, source.shape, op=op, root_rank=root_rank,
                               prescale=float(prescale), postscale=float(postscale), process_set=process_set,
                               device=device_of(source))
        return self._inbox.enqueue(Entry(request, [source], [output], output, self._waiters))

    def reducescatter(self, name: str, array: AnyArray, op: ReduceOp, *, prescale: float = 1.0, postscale: float = 1.0,
                      process_set: int = GLOBAL_PROCESS_SET_ID, blocking: bool = False) -> Handle:
        """Reduce over all ranks of a process set and give each its share of the rows, as a new array.

        Rows (the first dimension) are cut as evenly as possible; the first ranks get one more.

        Raises:
            UnsupportedError: like `allreduce`, and for a scalar.
        """
        op = ReduceOp(op)
        if op is ReduceOp.ADASUM:
            raise UnsupportedError(f"'{name}': reducescatter has no Adasum, which weighs whole tensors; use allreduce")
        check_rows(name, array, "reducescatter cuts")
        request = self.request(name, Collective.REDUCESCATTER, reducible(name, array, array, op), array.shape, op=op,
                               prescale=float(prescale), postscale=float(postscale), process_set=process_set,
                               device=device_of(array), blocking=blocking)
        return self._start(request, array)

    def broadcast(self, name: str, array: AnyArray, root_rank: int, *, process_set: int = GLOBAL_PROCESS_SET_ID,
                  over_control: bool = False, blocking: bool = False) -> Handle:
        """Overwrite `array` on every rank of a process set with rank `root_rank`'s.

        Args:
            root_rank: its number in the job, not in the set.
            over_control: send the array, which is small and on the host, over the control plane, which is authenticated,
                and never over a data plane.

        Raises:
            UnsupportedError: for an unsupported dtype, or a root or a caller that is not in the set.
            DuplicateNameError: Like `allreduce`.
        """
        check_writeable(name, array)
        request = self.request(name, Collective.BROADCAST, transportable(name, array), array.shape, root_rank=root_rank,
                               payload=self._payload(array, over_control) if self._world.rank == root_rank else None,
                               process_set=process_set, device=device_of(array), blocking=blocking)
        return self._start(request, array, in_place=True)

    def allgather(self, name: str, array: AnyArray, *, process_set: int = GLOBAL_PROCESS_SET_ID,
                  over_control: bool = False, blocking: bool = False) -> Handle:
        """Concatenate all ranks' arrays along the first dimension, in rank order, into a new array.

        Args:
            array: at least 1-D; the first dimension may differ between ranks and may be 0.
            over_control: as for `broadcast`.

        Raises:
            UnsupportedError: for a scalar or an unsupported dtype.
            DuplicateNameError: Like `allreduce`.
        """
        check_rows(name, array, "allgather concatenates along")
        request = self.request(name, Collective.ALLGATHER, transportable(name, array), array.shape,
                               payload=self._payload(array, over_control), process_set=process_set,
                               device=device_of(array), blocking=blocking)
        return self._start(request, array)

    def gather(self, name: str, array: AnyArray, root_rank: int, *, process_set: int = GLOBAL_PROCESS_SET_ID) -> Handle:
        """Like `allgather`, but only rank `root_rank` gets the result; the others get None."""
        check_rows(name, array, "gather concatenates along")
        request = self.request(name, Collective.GATHER, transportable(name, array), array.shape, root_rank=root_rank,
                               process_set=process_set, device=device_of(array))
        return self._start(request, array)

    def scatter(self, name: str, array: AnyArray, root_rank: int, *, process_set: int = GLOBAL_PROCESS_SET_ID) -> Handle:
        """Give each rank of a process set its share of the rows of rank `root_rank`'s array, as a new array.

        Args:
            array: the same shape and dtype on all ranks; only the root's values count. Rows are cut as by `reducescatter`.

        Raises:
            UnsupportedError: like `broadcast`, and for a scalar.
        """
        check_rows(name, array, "scatter cuts")
        request = self.request(name, Collective.SCATTER, transportable(name, array), array.shape, root_rank=root_rank,
                               process_set=process_set, device=device_of(array))
        return self._start(request, array)

    def alltoall(self, name: str, array: AnyArray, splits: Sequence[int] | None = None, *,
                 process_set: int = GLOBAL_PROCESS_SET_ID, blocking: bool = False) -> Handle:
        """Send rows to each rank of a process set and get rows from each; the result is (new array, rows from each rank).

        Args:
            array: at least 1-D; rows for rank 0 of the set first, then those for rank 1, and so on.
            splits: how many rows go to each rank of the set; rows beyond their sum stay here. Default: equal shares.

        Raises:
            UnsupportedError: for a scalar or an unsupported dtype, splits that do not fit, or rows that cannot be shared
                equally.
        """
        dtype = transportable(name, array)
        check_rows(name, array, "alltoall cuts")
        size, rows = len(self.members(process_set)), array.shape[0]
        if splits is None:
            if rows % size:
                raise UnsupportedError(f"'{name}': {rows} rows cannot be shared equally by {size} ranks; pass splits")
            splits = [rows // size] * size
        try:
            given = tuple(map(operator.index, splits))
        except TypeError:
            given = (-1,)
        if len(given) != size or min(given, default=0) < 0 or sum(given) > rows:
            raise UnsupportedError(f"'{name}': splits {list(splits)} must be {size} whole numbers from 0, one for each rank "
                                   f"of the set, with a sum of at most {rows}, the number of rows")
        request = self.request(name, Collective.ALLTOALL, dtype, array.shape, splits=given, process_set=process_set,
                               device=device_of(array), blocking=blocking)
        return self._start(request, array)

    def send(self, name: str, array: AnyArray, receiver: int, done: Callable[[Exception | None], None] | None = None,
             ) -> Handle:
        """Send an array to another rank, which calls `receive` with the same name; the result is None.

        The handle is done when it has arrived. Every pair of ranks is a process set of its own, members of others or not.

        Args:
            done: called by the background thread with the error, when the handle is done; more than once is possible.

        Raises:
            UnsupportedError: for an unsupported dtype, or a receiver that does not exist or is this rank.
            DuplicateNameError: Like `allreduce`.
        """
        return self._transfer(name, array, None, self._world.rank, receiver, done)

    def receive(self, name: str, array: AnyArray, sender: int, done: Callable[[Exception | None], None] | None = None,
                ) -> Handle:
        """Overwrite `array` with what another rank sends: the same name, shape and dtype."""
        return self._transfer(name, array, array, sender, self._world.rank, done)

    def _transfer(self, name: str, array: AnyArray, output: AnyArray | None, sender: int, receiver: int,
                  done: Callable[[Exception | None], None] | None) -> Handle:
        other = receiver if sender == self._world.rank else sender
        if other == self._world.rank or not 0 <= other < self._world.size:
            raise UnsupportedError(f"'{name}': rank {self._world.rank} exchanges tensors with another of the ranks "
                                   f"0..{self._world.size - 1}, not with {other}")
        request = self.request(name, Collective.SEND, transportable(name, array), array.shape, root_rank=sender,
                               payload=None if output is array else self._payload(array),
                               process_set=pair_set_id(sender, receiver, self._world.size), device=device_of(array))
        if done is not None:
            return self._inbox.enqueue(NotifyingEntry(request, [array], [output], output, self._waiters, done))
        return self._inbox.enqueue(Entry(request, [array], [output], output, self._waiters))

    def barrier(self, name: str, *, process_set: int = GLOBAL_PROCESS_SET_ID, blocking: bool = False) -> Handle:
        """Complete when every rank of a process set has made this call."""
        request = self.request(name, Collective.BARRIER, "uint8", (0,), process_set=process_set, blocking=blocking)
        return self._start(request, None)

    def join(self) -> Handle:
        """Take no further part until all ranks of the job have made this call; the result is the last one's rank.

        Meanwhile this rank contributes nothing to the others' collectives, and they do not wait for it. Average goes on
        dividing by the number of ranks in the process set, or by the active ones with HVDLITE_JOIN_DIVIDES_BY_ACTIVE.
        """
        return self._start(Request("join", Collective.JOIN, "uint8", (0,)), None)

    def add_process_set(self, ranks: Sequence[int]) -> Handle:
        """Register a process set; the result is its id. All ranks of the job make this call, with the same ranks.

        Raises:
            UnsupportedError: for ranks that do not exist, none at all, or a set that exists already.
        """
        members = tuple(sorted(ranks))
        size = self._world.size
        if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= size:
            raise UnsupportedError(f"a process set holds some of the ranks 0..{size - 1}, each once, not {list(ranks)}")
        known = self._state.process_sets.find(members)
        if known is not None:
            raise UnsupportedError(f"ranks {list(members)} are process set {known} already")
        request = Request("process_set.add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=members)
        return self._start(request, None)

    def remove_process_set(self, number: int) -> Handle:
        """Forget a process set, when nothing of it is under way; all ranks of the job make this call.

        Raises:
            UnsupportedError: for a set that does not exist, or the one of all ranks.
        """
        self.members(number)
        if number == GLOBAL_PROCESS_SET_ID:
            raise UnsupportedError("the process set of all ranks cannot be removed")
        request = Request("process_set.remove", Collective.REMOVE_PROCESS_SET, "uint8", (0,), members=(number,))
        return self._start(request, None)

    def request(self, name: str, collective: Collective, dtype: str, shape: tuple[int, ...], *, process_set: int,
                 root_rank: int = -1, **rest: Any) -> Request:
        """Return a request of a process set that this rank, and the root if there is one, belong to."""
        members = self._check_member(name, process_set)
        if collective in ROOTED and root_rank not in members:
            what = f"this job (0..{self._world.size - 1})" if process_set == GLOBAL_PROCESS_SET_ID else \
                f"process set {process_set}, which is ranks {list(members)}"
            raise UnsupportedError(f"'{name}': root_rank {root_rank} is not a rank of {what}")
        return Request(name, collective, dtype, shape, root_rank=root_rank, process_set_id=process_set, **rest)

    def _check_member(self, name: str, process_set: int) -> tuple[int, ...]:
        """Return the ranks of a process set, or raise `UnsupportedError` if this rank is not one of them."""
        members = self.members(process_set)
        if self._world.rank not in members:
            raise UnsupportedError(f"'{name}': rank {self._world.rank} is not a member of process set {process_set}, "
                                   f"which is ranks {list(members)}")
        if not name.isascii() and encodable(name) != name:
            raise UnsupportedError(f"'{encodable(name)}': the name of a tensor is sent as UTF-8, and this one has lone "
                                   "surrogates; use another name")
        return members

    def _payload(self, array: AnyArray | None, always: bool = False, *, blocking: bool = False) -> bytes | None:
        """Return what a tensor offers to the eager lane: its bytes, if they are few, or `always`."""
        limit = self._blocking_limit if blocking else self._eager_limit
        if type(array) is not np.ndarray or (array.nbytes > limit and not always):
            return None
        return array.tobytes()


def _memory(source: AnyArray | None, output: AnyArray) -> tuple[list[AnyArray | None], list[AnyArray]]:
    """Return sources and outputs of an entry; the same list when the call is in place."""
    outputs = [output]
    return (outputs if source is output else [source]), outputs  # type: ignore[return-value]
