"""The limits of open files and of processes: the first is raised as needed, and both are named in errors.

Connections, doorbells, pidfds and pipes each need a descriptor per rank. The usual soft limit of 1,024 is low for a host
with many ranks, and for rank 0 of a large job. Every process may raise its soft limit up to the hard limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from typing import Final

from hvdlite.core.errors import LaunchError

SPARE: Final = 512
"""Descriptors left for the script: files, sockets, data loader workers."""
OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Error codes for no descriptors left, in this process or in the whole system."""
NO_THREAD = "can't start new thread"
"""Python's message when the system refuses a thread."""


@contextlib.contextmanager
def reserve_descriptors(count: int, purpose: str, spare: int = SPARE) -> Iterator[None]:
    """Raise the soft limit for `count` more descriptors, which the code in this context opens; the limit is not restored.

    Args:
        purpose: the subject of error messages, such as "rank 0 of a job of 64 ranks".
        spare: how many more there should be, as far as the hard limit allows.

    Raises:
        LaunchError: if the hard limit is too low or the system has no descriptors left; with advice to raise the limit.
    """
    in_use = _in_use()
    soft, hard = _limits()
    if soft < in_use + count + spare:
        _raise_soft_limit(min(in_use + count + spare, hard))
    if hard < in_use + count:
        raise LaunchError(_explanation(count, in_use, purpose))
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENFILE:
            raise LaunchError(f"this system has no file descriptors left; {purpose} needs {count}. Its limit is the sysctl "
                              "fs.file-max") from error
        if error.errno == errno.EMFILE:
            raise LaunchError(_explanation(count, in_use, purpose)) from error
        raise


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


def _explanation(count: int, in_use: int, purpose: str) -> str:
    soft, hard = _limits()
    limit = f"the hard limit is {hard}" if soft == hard else f"the limit is {soft}, the hard limit {hard}"
    needed = in_use + count + SPARE
    return (f"{purpose} needs {count} more file descriptors, {in_use} are in use, and {limit} (RLIMIT_NOFILE). Raise the "
            f"hard limit of this host to {needed} or more: 'ulimit -n {needed}' as root, 'nofile' in "
            f"/etc/security/limits.conf, LimitNOFILE={needed} in a systemd unit (slurmd's too), or "
            f"'--ulimit nofile={needed}' of docker run")


def _limits() -> tuple[float, float]:
    """Return the soft and the hard limit."""
    soft, hard = (float("inf") if limit == resource.RLIM_INFINITY else limit
                  for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard


def _raise_soft_limit(wanted: float) -> None:
    with contextlib.suppress(OSError, ValueError):  # not permitted here; a later failure is explained
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _in_use() -> int:
    """Return the number of open descriptors of this process; 0 where it is unknown."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
