"""The calls a rank can make, checked where they are made, and the entries they become."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from hvdlite.core.array import Array, check_reducible, dtype_name, flat
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.core.world import World
from hvdlite.negotiation.messages import Request, Response
from hvdlite.runtime.handle import Handle


class Entry:
    """A tensor between its call and its completion."""

    __slots__ = ("_abandoned", "_shaped", "handle", "output", "request", "source")

    def __init__(self, request: Request, source: Array | None, output: Array | None) -> None:
        self.request = request
        self.source = None if source is None else flat(source)
        self.output = None if output is None else flat(output)
        self._shaped = output  # what the handle returns
        self.handle = Handle(request.name)
        self._abandoned = False

    def prepare(self, response: Response) -> None:
        """Allocate an output whose size only the response tells."""
        if response.collective is Collective.ALLGATHER:
            assert self.source is not None
            self._shaped = np.empty((sum(response.rows), *self.request.shape[1:]), self.source.dtype)
            self.output = flat(self._shaped)

    def complete(self, response: Response) -> None:
        """Hand the result to whoever waits."""
        if not self._abandoned:
            self.handle._complete(self._shaped, response.contributors)

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

    def __init__(self) -> None:
        self._counters: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
        self._counters_lock = threading.Lock()

    def _submit(self, entry: Entry) -> Handle:
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
        dtype = _checked(name, output)
        check_reducible(dtype, op, f"'{name}'")
        if source is not None and (source.shape != output.shape or source.dtype != output.dtype):
            raise UnsupportedError(f"'{name}': source is {source.dtype}{list(source.shape)}, "
                                   f"output {output.dtype}{list(output.shape)}; they must be equal")
        if source is not None:
            _checked(name, source)
        request = Request(name, Collective.ALLREDUCE, dtype, output.shape, op, prescale=float(prescale),
                          postscale=float(postscale), absent=source is None)
        return self._submit(Entry(request, source, output))

    def broadcast(self, name: str, array: Array, root_rank: int) -> Handle:
        """Overwrite `array` on every rank with rank `root_rank`'s.

        Raises:
            UnsupportedError: for an unsupported dtype or a root that does not exist.
            DuplicateNameError: Like `allreduce`.
        """
        dtype = _checked(name, array)
        if not 0 <= root_rank < self.world.size:
            raise UnsupportedError(f"'{name}': root_rank {root_rank} is not a rank of this job (0..{self.world.size - 1})")
        request = Request(name, Collective.BROADCAST, dtype, array.shape, root_rank=root_rank)
        return self._submit(Entry(request, array, array))

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
        return self._submit(Entry(Request(name, Collective.ALLGATHER, dtype, array.shape), array, None))

    def barrier(self, name: str) -> Handle:
        """Complete when every rank has made this call."""
        return self._submit(Entry(Request(name, Collective.BARRIER, "uint8", (0,)), None, None))


def _checked(name: str, array: Array) -> str:
    """Return the dtype's name of an array that a plane can take, or raise `UnsupportedError`."""
    dtype = dtype_name(array.dtype)
    if not array.flags.c_contiguous:
        raise UnsupportedError(f"'{name}': the array of shape {list(array.shape)} is not C-contiguous; "
                               "pass numpy.ascontiguousarray(...)")
    return dtype
