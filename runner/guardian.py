"""Ends a job whose launcher was killed. Run by path, with the standard library only, so it starts in milliseconds.

    python guardian.py JOB_DIRECTORY MARK

It reads its standard input, whose other end only the launcher holds. Its end without the word "done" means that the
launcher is gone: every process that has MARK in its environment (ranks, their workers, whatever they started, in any
session) is killed, and the job's directory removed.
"""

import os
import shutil
import signal
import sys
import time

PATIENCE = 8.0
"""Seconds to go on killing; a process that forks faster than that is not ours to outrun."""


def marked_processes(mark: bytes) -> list[int]:
    """Return the ids of all live processes with `mark` in their environment (Linux; elsewhere none)."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue  # gone, or somebody else's
    return found


def kill_marked(mark: bytes, patience: float = PATIENCE) -> None:
    """Kill every process with `mark` in its environment, until there is none."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        alive = [pid for pid in marked_processes(mark) if not _is_zombie(pid)]
        if not alive:
            return
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def main() -> None:
    """Wait for the launcher's end."""
    directory, mark = sys.argv[1], sys.argv[2].encode()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C is for the launcher
    if sys.stdin.buffer.read().strip() != b"done":
        kill_marked(mark)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
