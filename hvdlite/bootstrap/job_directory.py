"""The job directory of a host: opened once, checked, and used by its descriptor, so that nobody can exchange it.

hvdrun makes a directory and passes its path to the ranks. Under other launchers the ranks of a host have a common prefix
only (`agreed_prefix`), which other users can guess: the first rank makes a directory with a random name behind the prefix,
and the other ranks look for the newest one that belongs to their user. Directories and links of other users are ignored, so
a prefix cannot be taken.

The first rank holds a lock on its directory (flock). The lock ends with the process, so a directory without one was left by
a job that was killed while its ranks met: the next job with this prefix removes it. Only sockets in it are removed, and the
directory if nothing else is there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import JOB_DIRECTORY, is_private_directory

_OPENING: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PREFIX: Final = re.compile(r"hvdlite-\d+-[0-9a-f]{32}")
_RANDOM: Final = re.compile(r"\.[a-z0-9_]{8}")  # as `tempfile.mkdtemp` makes it
_ATTEMPTS: Final = 100


def host_identity() -> str:
    """Return a text that two processes share exactly when they see the same kernel and the same process ids."""
    return ":".join((socket.gethostname(), _read(lambda: Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()),
                     _read(lambda: os.readlink("/proc/self/ns/pid"))))


def network_identity() -> str:
    """Return a text that two processes of a host share exactly when they have the same network."""
    return _read(lambda: os.readlink("/proc/self/ns/net"))


def agreed_prefix(*ids: str) -> str:
    """Return what the path of a job's directory on this host begins with.

    Ranks in different containers get different ones, even if the containers share the directory for temporary files.

    Args:
        ids: equal on the job's ranks of this host, and different from other jobs'.
    """
    where = (host_identity(), network_identity())
    digest = hashlib.sha256("|".join([*ids, *where]).encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(temporary_directory(), f"hvdlite-{os.geteuid()}-{digest[:32]}")


def temporary_directory() -> str:
    """Return the directory for temporary files.

    Raises:
        LaunchError: when there is none in which this process can write.
    """
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise LaunchError(f"there is no directory for temporary files, where the ranks of this host meet: {error.strerror}; "
                          "name one with TMPDIR, or make room") from error


def _read(action: Callable[[], str]) -> str:
    try:
        return action()
    except OSError:
        return ""


class JobDirectory:
    """A directory of mode 0700 that belongs to this user.

    Args:
        path: of the directory; or, if ranks agree on it themselves, its beginning: an `agreed_prefix`.
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
            for left in _own(where):
                _remove_if_left(left)
            self._made, self._descriptor = _made_and_locked(where)
        except OSError as error:
            raise LaunchError(f"cannot make a directory in {where.parent}, where the ranks of this host meet: "
                              f"{error.strerror}; name another place with TMPDIR") from None

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
        if self._made:
            _remove(self._made, self._descriptor)
        self._close()

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
    return _private(descriptor, path)


def _private(descriptor: int, path: str) -> int:
    """Return the descriptor of a directory that only this user can enter; close another one."""
    status = os.fstat(descriptor)
    if not is_private_directory(status):
        os.close(descriptor)
        raise LaunchError(f"{path} must belong to user {os.geteuid()} and have mode 0700, because a user who can enter it "
                          f"can connect to the job (owner {status.st_uid}, mode {status.st_mode & 0o777:04o})")
    return descriptor


def _own(prefix: Path) -> list[str]:
    """Return the directories of this user that jobs with a prefix have made, the newest one first."""
    if not _PREFIX.fullmatch(prefix.name):
        raise ValueError(f"{prefix} is no prefix of job directories")
    found = []
    with os.scandir(prefix.parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix.name) and _RANDOM.fullmatch(entry.name, len(prefix.name)):
                with contextlib.suppress(OSError):  # it is gone
                    status = entry.stat(follow_symlinks=False)
                    if is_private_directory(status):
                        found.append((status.st_ctime_ns, entry.path))
    return [path for _, path in sorted(found, reverse=True)]


def _made_and_locked(prefix: Path) -> tuple[str, int]:
    """Return the path of a new directory, and its descriptor, which holds the lock."""
    for _ in range(_ATTEMPTS):
        made = tempfile.mkdtemp(prefix=f"{prefix.name}.", dir=prefix.parent)
        try:
            descriptor = os.open(made, _OPENING)
        except FileNotFoundError:  # another job has found it without a lock, and removed it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another job is removing it
            os.close(descriptor)
            continue
        except OSError:
            pass  # a file system without locks: what is left there stays
        if _is_at(made, descriptor):
            return made, _private(descriptor, made)  # some file systems know no modes
        os.close(descriptor)
    raise FileExistsError(errno.EEXIST, "other jobs remove the directory again and again")


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_if_left(path: str) -> None:
    """Remove a directory if the process that made it has ended."""
    with contextlib.suppress(LaunchError, OSError):
        descriptor = _opened(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path, descriptor)
        finally:
            os.close(descriptor)


def _remove(path: str, descriptor: int) -> None:
    """Remove a directory and the sockets in it; one with anything else stays."""
    with contextlib.suppress(OSError):
        for name in os.listdir(descriptor):
            if stat.S_ISSOCK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=descriptor)
        os.rmdir(path)


def _newest(prefix: Path) -> int:
    """Return a descriptor of the newest directory of this user with a prefix."""
    for path in _own(prefix):
        with contextlib.suppress(LaunchError):
            return _opened(path)
    raise FileNotFoundError(errno.ENOENT, "the first rank of this host has not made the directory where they meet (ranks "
                            "with another TMPDIR, or in another container, do not find it)", f"{prefix}.*")
