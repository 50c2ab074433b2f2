"""The backend "hvdlite" of `torch.distributed`: `init_process_group("hvdlite")`. Importing this package registers it."""

from __future__ import annotations

import datetime
import warnings
from typing import Any

import torch

from hvdlite_torch.distributed.registration import NAME, register

__all__ = ["NAME", "dump_fr_trace", "monitored_barrier", "register", "set_environment", "stop_requested"]

register()


def dump_fr_trace() -> dict[str, Any]:
    """Return the last collectives of this rank's process groups, in the format of torch's Flight Recorder.

    A file for `torchfrtrace` has it pickled, and its name ends with the rank. Such files are written when collectives fail,
    and with each stall report, if the variable TORCH_FR_DUMP_TEMP_FILE is set: to their names, without the rank.
    """
    from hvdlite_torch.distributed import fr_trace, process_group

    return fr_trace.dump(process_group.records())


def monitored_barrier(group: Any = None, timeout: datetime.timedelta | float | None = None,
                      wait_all_ranks: bool = False) -> None:
    """Wait for all ranks of a process group, like `torch.distributed.monitored_barrier`: torch 2.13 has that for Gloo only.

    Args:
        group: the process group; the default one without it.
        timeout: a number is in seconds; that of the group without it.
        wait_all_ranks: whether rank 0 waits until the timeout is over, and names all ranks that have not come; else it
            names the first one.

    Raises:
        DistBackendError: on all ranks that have come; it names those that have not.
    """
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        warnings.warn("monitored_barrier was called by a rank that is not in the group", stacklevel=2)
        return
    group = torch.distributed.group.WORLD if group is None else group
    if isinstance(timeout, (int, float)):
        timeout = datetime.timedelta(seconds=timeout)
    group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def stop_requested() -> bool:
    """Return whether to stop: False, then True in the same call on all ranks. See `hvdlite_torch.stop_requested`."""
    from hvdlite import boundaries

    return boundaries.stop_requested()


def set_environment() -> None:
    """Set the variables that `init_process_group` reads (RANK, MASTER_ADDR, ...) from those of mpirun, mpiexec or srun.

    hvdrun and torchrun set them themselves, and what is set is not changed. With ranks on several hosts, mpirun does not
    reveal where rank 0 is: set MASTER_ADDR. MASTER_PORT is derived from the job's ids; set it where another program uses
    that port.

    Raises:
        LaunchError: when no launcher has started this process, or MASTER_ADDR is needed.
    """
    from hvdlite import api

    api.set_torch_variables()
