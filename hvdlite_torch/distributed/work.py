"""Work: what an asynchronous operation of a process group returns."""

from __future__ import annotations

import datetime
import threading
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.ordered.call import Call
from hvdlite_torch.distributed.errors import WaitTimeoutError, as_backend_error

if TYPE_CHECKING:
    _Work: Any = object
else:
    from torch._C._distributed_c10d import Work as _Work

NO_TIMEOUT = datetime.timedelta()
"""`wait` without an own timeout: the operation has that of its process group."""


class GroupWork(_Work):  # type: ignore[misc]
    """Implements torch's `Work` over a call of an ordered group.

    torch may drop this object while the operation is under way: what it needs belongs to the call, which the group keeps.

    Args:
        call: the operation.
        tensors: the result.
    """

    def __init__(self, call: Call, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._call, self._tensors = call, tensors
        self._future: Any = None
        self._lock = threading.Lock()

    def is_completed(self) -> bool:
        """Return whether it is over, successfully or not."""
        return self._call.is_done

    def is_success(self) -> bool:
        """Return whether it is over and has not failed."""
        return self._call.is_done and self._call.error is None

    def exception(self) -> Exception | None:
        """Return what it failed with."""
        error = self._call.error
        return None if error is None else as_backend_error(error)

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is over, and return True. May be called again.

        Raises:
            WaitTimeoutError: when it takes longer than a timeout that is not 0; it stays under way.
            DistBackendError: when it has failed; at every call.
        """
        call = self._call
        if not call.is_done and not call.wait(timeout.total_seconds() if timeout > NO_TIMEOUT else None):
            names = "; ".join(operation.agreed for operation in call.operations)
            raise WaitTimeoutError(f"{names or 'the operation'} is still under way after {timeout.total_seconds():g} s "
                                   "(the timeout of wait)")
        if call.error is not None:
            raise as_backend_error(call.error)
        return True

    def synchronize(self) -> None:
        """Wait; there is no stream to wait for."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait; there is no stream to wait for."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that has sent what this work receives; -1 before it is known."""
        return self._call.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of `result()`. Its callbacks run on the thread that ends the operation.

        If the operation fails, waiting for the future raises a `RuntimeError` with the class and the text of the error.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            ended: Any = torch.futures.Future()
            # Not `Future.set_exception`: C++, such as DDP's reducer, takes the exception for the result then.
            self._future = ended.then(self._outcome)
        self._call.when_done(lambda call: ended.set_result(None))
        return self._future

    def abort(self) -> None:
        """Refuse: the other ranks take part in the operation; `ProcessGroup.abort` ends all that are under way."""
        raise NotImplementedError("hvdlite aborts process groups, not single operations: call abort() of the group")

    def _outcome(self, ended: Any) -> list[torch.Tensor]:
        if self._call.error is not None:
            raise as_backend_error(self._call.error)
        return self._tensors


class Works(_Work):  # type: ignore[misc]
    """Several operations as one work.

    Args:
        works: in the order of their calls.
    """

    def __init__(self, works: list[GroupWork]) -> None:
        super().__init__()
        self._works = works

    def is_completed(self) -> bool:
        """Return whether all are over."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all are over and none has failed."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """Return what the first one that failed has failed with."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Wait for all; see `GroupWork.wait`."""
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors of all."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        """Return a future of `result()`."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda futures: [tensor for future in futures.value() for tensor in future.value()])
