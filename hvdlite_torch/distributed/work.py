"""Work: what an asynchronous operation of a process group returns."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.groups.call import Call
from hvdlite.groups.group import Group
from hvdlite_torch.distributed.errors import WaitTimeoutError, as_backend_error

if TYPE_CHECKING:
    _Work: Any = object
else:
    from torch._C._distributed_c10d import Work as _Work

NO_TIMEOUT = datetime.timedelta()
"""`wait` without an own timeout: the operation has that of its process group."""


class GroupWork(_Work):  # type: ignore[misc]
    """Implements torch's `Work` over calls of a group.

    torch may drop this object while the operation is under way: what it needs belongs to the calls, which the group keeps.

    Args:
        group: whose calls they are.
        calls: the operation, or several that were begun together, in their order.
        tensors: the result.
    """

    def __init__(self, group: Group, calls: Sequence[Call], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._group, self._calls, self._tensors = group, calls, tensors

    def is_completed(self) -> bool:
        """Return whether it is over, successfully or not."""
        return all(call.is_done for call in self._calls)

    def is_success(self) -> bool:
        """Return whether it is over and has not failed."""
        return self.is_completed() and self._error() is None

    def exception(self) -> Exception | None:
        """Return what it failed with."""
        error = self._error()
        return None if error is None else as_backend_error(error)

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is over, and return True. May be called again.

        Raises:
            WaitTimeoutError: when one of the calls takes longer than a timeout that is not 0; it stays under way.
            DistBackendError: when it has failed; at every call.
        """
        for call in self._calls:
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

    block_current_stream = synchronize

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that has sent what this work receives; -1 before it is known."""
        return self._calls[-1].source if self._calls else -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a new future of `result()`. Its callbacks run on the thread that ends the operation.

        They may call collectives and wait for them, if they are attached before the next call of the group. If the group has
        been called since this work's operation, and the operation is under way, the future is complete when those calls are
        over, too: see `Group.when_over`. If the operation fails, waiting for the future raises a `RuntimeError` with
        the class and the text of the error.
        """
        ended: Any = torch.futures.Future()
        # Not `Future.set_exception`: C++, such as DDP's reducer, takes the exception for the result then.
        future = ended.then(self._outcome)
        self._group.when_over(self._calls, lambda: ended.set_result(None))
        return future

    def abort(self) -> None:
        """Refuse: the other ranks take part in the operation; `ProcessGroup.abort` ends all that are under way."""
        raise NotImplementedError("hvdlite aborts process groups, not single operations: call abort() of the group")

    def _outcome(self, ended: Any) -> list[torch.Tensor]:
        error = self._error()
        if error is not None:
            raise as_backend_error(error)
        return self._tensors

    def _error(self) -> Exception | None:
        """Return the error of the first call that has failed."""
        for call in self._calls:
            if call.error is not None:
                return call.error
        return None
