"""The backend "hvdlite" of `torch.distributed`: `init_process_group("hvdlite")`. Importing this package registers it."""

from __future__ import annotations

import datetime
import warnings
from typing import Any

import torch

from hvdlite_torch.distributed.registration import NAME, register

__all__ = ["NAME", "monitored_barrier", "register"]

register()


def monitored_barrier(group: Any = None, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """Wait for all ranks of a process group, like `torch.distributed.monitored_barrier`, which torch has for Gloo only.

    Args:
        group: the process group; the default one without it.
        timeout: that of the group without it.
        wait_all_ranks: whether rank 0 waits until the timeout is over, and names all ranks that have not come; else it
            names the first one.

    Raises:
        DistBackendError: on rank 0, with the ranks that have not come in time; on the others when rank 0 fails.
    """
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        warnings.warn("monitored_barrier was called by a rank that is not in the group", stacklevel=2)
        return
    group = torch.distributed.group.WORLD if group is None else group
    group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
