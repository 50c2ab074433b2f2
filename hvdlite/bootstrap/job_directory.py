"""The job directory of a host: opened once, checked, and used by its descriptor, so that nobody can exchange it.

hvdrun makes a directory and tells its ranks the path. Under other launchers the ranks of a host know a common prefix only,
which other users can guess: the first rank makes a directory with a random name behind the prefix, and the other ranks look
for the newest one that belongs to their user. Directories and links of other users are ignored, so a prefix cannot be taken.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import JOB_DIRECTORY

_OPENING = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class JobDirectory:
    """A directory of mode 0700 that belongs to this user.

    Args:
        path: of the directory; or, if ranks agree on it themselves, what the paths of this job's directory begin with.
        agreed: whether the first rank of this host makes the directory, and the others find it.

    Raises:
        LaunchError: when the directory is not this user's alone.
    """

    def __init__(self, path: str, *, agreed: bool = False) -> None:
        self.path = path
        self._agreed = agreed
        self._made = ""
        self._descriptor = -1 if agreed else _opened(path)

    def make(self) -> None:
        """Make the directory, unless the launcher has made it, or this object; on the first rank of the host."""
        if not self._agreed or self._made:
            return
        where = Path(self.path)
        try:
            for left in _own(where):  # by a job that was killed while its ranks met
                shutil.rmtree(left, ignore_errors=True)
            self._made = tempfile.mkdtemp(prefix=f"{where.name}.", dir=where.parent)
        except OSError as error:
            raise LaunchError(f"cannot make a directory in {where.parent}, where the ranks of this host meet: "
                              f"{error.strerror}; name another place with TMPDIR") from None
        self._descriptor = _opened(self._made)

    def socket_path(self, name: str) -> str:
        """Return a path of a socket in the directory that leads there, even if the directory is renamed.

        Raises:
            FileNotFoundError: when the first rank has not made the directory yet.
        """
        if self._agreed and not self._made:
            self._close()
            self._descriptor = _newest(Path(self.path))
        if os.path.isdir("/proc/self/fd"):
            return f"/proc/self/fd/{self._descriptor}/{name}"
        return os.path.join(self._made or self.path, name)

    def close(self) -> None:
        """Close the descriptor; remove the directory where this object made it."""
        self._close()
        if self._made:
            shutil.rmtree(self._made, ignore_errors=True)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _opened(path: str) -> int:
    """Return a descriptor of a directory that only this user can enter."""
    try:
        descriptor = os.open(path, _OPENING)
    except OSError as error:
        reason = "it is a symbolic link, or no directory" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror
        raise LaunchError(f"{JOB_DIRECTORY}={path}: {reason}") from None
    status = os.fstat(descriptor)
    if not _is_private(status):
        os.close(descriptor)
        raise LaunchError(f"{path} must belong to user {os.geteuid()} and have mode 0700, because a user who can enter it "
                          f"can connect to the job (owner {status.st_uid}, mode {status.st_mode & 0o777:04o})")
    return descriptor


def _is_private(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _own(prefix: Path) -> list[str]:
    """Return the directories of this user whose names begin with a prefix and a dot, the newest one first."""
    found = []
    with os.scandir(prefix.parent) as entries:
        for entry in entries:
            if entry.name.startswith(f"{prefix.name}."):
                with contextlib.suppress(OSError):  # it is gone
                    status = entry.stat(follow_symlinks=False)
                    if _is_private(status):
                        found.append((status.st_ctime_ns, entry.path))
    return [path for _, path in sorted(found, reverse=True)]


def _newest(prefix: Path) -> int:
    """Return a descriptor of the newest directory of this user with a prefix."""
    for path in _own(prefix):
        with contextlib.suppress(LaunchError):
            return _opened(path)
    raise FileNotFoundError(errno.ENOENT, "rank 0 has not made the directory where the ranks of this host meet",
                            f"{prefix}.*")
