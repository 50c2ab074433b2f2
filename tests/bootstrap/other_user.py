"""Another user of this host, for tests that run as root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OTHER = 65534
"""The user id of nobody."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextlib.contextmanager
def other_user() -> Iterator[None]:
    """Provide this process with another user's rights; no other thread may need its own meanwhile."""
    os.seteuid(OTHER)
    try:
        yield
    finally:
        os.seteuid(0)


def as_other_user(action: Callable[[], object]) -> None:
    """Call a function in a forked child that is another user's."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(OTHER)
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0


def shared_by_all(folder: Path) -> Path:
    """Return a folder like /tmp, inside one that only pytest's user can enter otherwise."""
    shared = folder / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    for parent in [folder, *folder.parents]:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return shared
