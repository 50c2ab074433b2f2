"""The limit of processes: what cannot be started because of it is one line, with the limit's name."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

from hvdlite.core.errors import LaunchError

NO_THREAD = "can't start new thread"
"""Python's message when the system refuses a thread."""


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Return a context that starts a process or a thread.

    Args:
        what: the process or thread, such as "the process of rank 3".

    Raises:
        LaunchError: when the system refuses it because there are too many.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        refused = error.errno == errno.EAGAIN if isinstance(error, OSError) else str(error) == NO_THREAD
        if not refused:
            raise
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "not limited" if soft == resource.RLIM_INFINITY else str(soft)
        raise LaunchError(
            f"cannot start {what}: no more processes and threads are allowed here. `ulimit -u` (RLIMIT_NPROC, for all of "
            f"this user's) is {limit}; a container or a Slurm step may have a lower one (pids.max of its cgroup)") from None
