"""Directories of tests beside pytest's, with short paths, because sockets lie in them; killed tests leave them behind."""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

OLD_SECONDS = 3600.0
"""A directory that has not changed for so long is nobody's, if the process after which it is called does not exist."""


def prefix(kind: str) -> str:
    """Return how the name of a temporary directory of this process begins.

    The first call removes the directories of processes that were killed: of tests, and of jobs that tests had started.
    """
    remove_old(Path(tempfile.gettempdir()))
    return f"hvdlite-{kind}-{os.getpid()}-"


@functools.cache
def remove_old(folder: Path) -> None:
    """Remove this user's directories in a folder, whose processes do not exist any more."""
    for path in folder.glob("hvdlite-*-*-*"):
        found = re.match(r"hvdlite-(?:test|out|elastic|fuzz|job)-(\d+)-", path.name)
        try:
            status = path.stat()
            if found and status.st_uid == os.geteuid() and time.time() - status.st_mtime > OLD_SECONDS:
                os.kill(int(found[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another process has removed it, or it is another user's
            pass
