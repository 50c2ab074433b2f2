"""The calls a rank can make, checked where they are made, and the entries they become."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from hvdlite.core.array import Array, check_reducible, dtype_name, flat
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.core.world import World
from hvdlite.negotiation.messages import Request, Response
from hvdlite.runtime.handle import Handle, Sleepers


class Entry:
    """A tensor, or a group of them, between its call and its completion."""

    __slots__ = ("_abandoned", "_result", "handle", "outputs", "request", "sources")

    def __init__(self, request: Request, sources: Sequence[Array | None], outputs: Sequence[Array],
                 result: Array | Sequence[Array] | None, sleepers: Sleepers) -> None:
        self.request = request
        self.sources = [None if source is None else flat(source) for source in sources]
        self.outputs: list[Array | None] = self.sources if outputs is sources else [flat(output) for output in outputs]
        self._result = result  # what the handle returns
        self.handle = Handle(request.name, sleepers)
        self._abandoned = False

    def prepare(self, response: Response) -> None:
        """Allocate an output whose size only the response tells."""
        if response.collective is Collective.ALLGATHER:
            (source,) = self.sources
            assert source is not None
            gathered = np.empty((sum(response.rows), *self.request.shape[1:]), source.dtype)
            self._result, self.outputs = gathered, [flat(gathered)]

    def deliver(self, result: bytes) -> None:
        """Take a result that came with the decision."""
        (output,) = self.outputs
        assert output is not None
        np.copyto(output.view(np.uint8), np.frombuffer(result, np.uint8))

    def complete(self, response: Response) -> None:
        """Hand the result to whoever waits."""
        if not self._abandoned:
            self.handle._complete(self._result, response.contributors)

    def fail(self, error: Exception) -> None:
        """Hand an error to whoever waits."""
        if not self._abandoned:
            self.handle._fail(error)

    def abandon(self, error: Exception) -> None:
        """Fail the handle now, although the others may still need this entry's memory; again is fine."""
        self.fail(error)
        self._abandoned = True


class Calls:
    """The collectives of one rank on NumPy arrays; `_submit` hands an entry to the engine.

    Every call checks its arguments and returns a `Handle` without blocking. The arrays must be C-contiguous, stay alive
    and not be written until the handle is done.
    """

    world: World

    def __init__(self, eager_limit: int) -> None:
        self._eager_limit = eager_limit
        self._sleepers = Sleepers(self._about_to_sleep)
        self._counters: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
        self._counters_lock = threading.Lock()

    def _submit(self, entry: Entry) -> Handle:
        raise NotImplementedError

    def _about_to_sleep(self) -> None:
        raise NotImplementedError

    def unnamed(self, adapter: str, kind: str) -> str:
        """Return the next name for a call without one; equal on all ranks when they make the same calls in order."""
        with self._counters_lock:
            return f"{adapter}.{kind}.noname.{next(self._counters[adapter, kind])}"

    def allreduce(self, name: str, source: Array | None, output: Array, op: ReduceOp, *, prescale: float = 1.0,
                  postscale: float = 1.0) -> Handle:
        """Reduce over all ranks into `output`.

        Args:
            source: this rank's values, of `output`'s shape and dtype, possibly the same memory; None when this rank has
                nothing to contribute: it then counts as zeros for Sum and Average, which still divides by the world's
                size. When nobody contributes, `output` is untouched and `handle.contributors` is empty.
            op: AVERAGE, SUM, MIN or MAX. Integer averages are truncated toward zero; 16-bit floats are summed in float32.
            prescale: factor on every rank's values before the reduction.
            postscale: factor on the result.

        Raises:
            UnsupportedError: for a dtype or op that cannot be served, or arrays that do not match.
            DuplicateNameError: when `name` is still being processed on this rank.
        """
        op = ReduceOp(op)
        dtype = reducible(name, source, output, op)
        request = Request(name, Collective.ALLREDUCE, dtype, output.shape, op, prescale=float(prescale),
                          postscale=float(postscale), absent=source is None, payload=self._payload(source))
        return self._submit(Entry(request, *_memory(source, output), output, self._sleepers))

    def grouped_allreduce(self, name: str, sources: Sequence[Array], outputs: Sequence[Array], op: ReduceOp, *,
                          prescale: float = 1.0, postscale: float = 1.0) -> Handle:
        """Like `allreduce`, of several arrays of one dtype that are negotiated and answered as one; the result is `outputs`.

        Args:
            sources: not empty; the same number of arrays, of the same shapes, on all ranks.

        Raises:
            UnsupportedError: like `allreduce`, and for arrays of different dtypes.
        """
        op = ReduceOp(op)
        dtypes = {reducible(f"{name}.{index}", source, output, op)
                  for index, (source, output) in enumerate(zip(sources, outputs, strict=True))}
        if len(dtypes) != 1:
            raise UnsupportedError(f"'{name}': the arrays of one group must have one dtype, not {sorted(dtypes) or 'none'}")
        request = Request(name, Collective.ALLREDUCE, dtypes.pop(), (sum(output.size for output in outputs),), op,
                          prescale=float(prescale), postscale=float(postscale),
                          group=tuple(output.shape for output in outputs))
        return self._submit(Entry(request, sources, outputs, outputs, self._sleepers))

    def broadcast(self, name: str, array: Array, root_rank: int) -> Handle:
        """Overwrite `array` on every rank with rank `root_rank`'s.

        Raises:
            UnsupportedError: for an unsupported dtype or a root that does not exist.
            DuplicateNameError: Like `allreduce`.
        """
        dtype = _checked(name, array)
        if not 0 <= root_rank < self.world.size:
            raise UnsupportedError(f"'{name}': root_rank {root_rank} is not a rank of this job (0..{self.world.size - 1})")
        request = Request(name, Collective.BROADCAST, dtype, array.shape, root_rank=root_rank,
                          payload=self._payload(array) if self.world.rank == root_rank else None)
        return self._submit(Entry(request, *_memory(array, array), array, self._sleepers))

    def allgather(self, name: str, array: Array) -> Handle:
        """Concatenate all ranks' arrays along the first dimension, in rank order, into a new array.

        Args:
            array: at least 1-D; the first dimension may differ between ranks and may be 0.

        Raises:
            UnsupportedError: for a scalar or an unsupported dtype.
            DuplicateNameError: Like `allreduce`.
        """
        dtype = _checked(name, array)
        if array.ndim == 0:
            raise UnsupportedError(f"'{name}': allgather concatenates along the first dimension, and a scalar has none; "
                                   "pass an array of shape (1,)")
        request = Request(name, Collective.ALLGATHER, dtype, array.shape, payload=self._payload(array))
        return self._submit(Entry(request, [array], [], None, self._sleepers))

    def barrier(self, name: str) -> Handle:
        """Complete when every rank has made this call."""
        return self._submit(Entry(Request(name, Collective.BARRIER, "uint8", (0,)), [], [], None, self._sleepers))

    def _payload(self, array: Array | None) -> bytes | None:
        """Return what a tensor offers to the eager lane: its bytes, if they are few."""
        if array is None or array.nbytes > self._eager_limit:
            return None
        return array.tobytes()


def reducible(name: str, source: Array | None, output: Array, op: ReduceOp) -> str:
    """Return the dtype's name of arrays that can be reduced with `op`, or raise `UnsupportedError`.

    `source` must be of `output`'s shape and dtype; None stands for a rank that contributes nothing.
    """
    dtype = _checked(name, output)
    check_reducible(dtype, op, f"'{name}'")
    if source is None or source is output:
        return dtype
    if source.shape != output.shape or source.dtype != output.dtype:
        raise UnsupportedError(f"'{name}': source is {source.dtype}{list(source.shape)}, "
                               f"output {output.dtype}{list(output.shape)}; they must be equal")
    return _checked(name, source)


def _memory(source: Array | None, output: Array) -> tuple[list[Array | None], list[Array]]:
    """Return sources and outputs of an entry; the same list when the call is in place."""
    outputs = [output]
    return (outputs if source is output else [source]), outputs  # type: ignore[return-value]


def _checked(name: str, array: Array) -> str:
    """Return the dtype's name of an array that a plane can take, or raise `UnsupportedError`."""
    dtype = dtype_name(array.dtype)
    if not array.flags.c_contiguous:
        raise UnsupportedError(f"'{name}': the array of shape {list(array.shape)} is not C-contiguous; "
                               "pass numpy.ascontiguousarray(...)")
    return dtype
