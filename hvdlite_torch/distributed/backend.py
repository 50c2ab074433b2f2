"""The backend that torch 2.14 and later find in a process group: there Python can implement c10d's `Backend`.

Scripts call the methods of the process group (`process_group.py`), which returns works of our own class. What torch's C++
calls on a backend comes here; it wraps the works, and the wrapper passes on `wait` and `get_future` only.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, Final

from torch._C import _distributed_c10d as c10d

from hvdlite.groups.group import Group
from hvdlite_torch.distributed.collectives import Collectives
from hvdlite_torch.distributed.work import GroupWork

if TYPE_CHECKING:
    _Backend: Any = object
else:
    _Backend = c10d.Backend

NAME: Final = "hvdlite"
IS_POSSIBLE: Final = "rank" in (c10d.Backend.__init__.__doc__ or "")
"""Whether `Backend` has a constructor, so that Python can derive from it."""


class HvdliteBackend(Collectives, _Backend):  # type: ignore[misc]
    """Implements c10d's `Backend` for host memory; torch keeps the backends of other devices beside it.

    Args:
        group: carries out the calls.
        timeout: of operations.
    """

    supports_splitting = True  # by the process group: torch never asks the backend to
    supports_coalescing = False
    supports_shrinking = False

    def __init__(self, group: Group, timeout: datetime.timedelta) -> None:
        super().__init__(group.rank, group.size)
        self.attach(group)
        options: Any = c10d.Backend.Options(NAME, timeout)
        options.group_name = group.name
        self._options = options

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME

    @property
    def options(self) -> Any:
        """The backend's options, with which torch makes parts of the group."""
        return self._options

    def get_error(self) -> Any:
        """Return that there is no error: those of operations are raised by their work."""
        return c10d.ErrorType.SUCCESS

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
