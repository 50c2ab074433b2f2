"""The reaper ends a job whose launcher was killed. It uses the standard library only, so it starts in milliseconds.

    python reaper.py JOB_DIRECTORY MARK

It reads its standard input, whose other end only the launcher holds: a line "rank PID" for each rank that is started,
and "done". Its end without "done" means that the launcher is gone: all processes of the job are killed, and the job's
directory removed.

A process is of the job when it has MARK in its environment, is in the session or group of a rank, or descends from one
that is. Each of the three alone can be shaken off: by a cleaned environment (or a rewritten title, which lies in the
same memory), by setsid, by a parent that has ended.
"""

import os
import shutil
import signal
import sys
import time
from typing import NamedTuple

TIMEOUT_SECONDS = 8.0
"""Seconds to go on killing; a process that forks faster than that is not ours to outrun."""


class Process(NamedTuple):
    """A line of the process table."""

    parent: int
    group: int
    session: int
    state: str  # Z and X: has ended, and nobody can kill it


def process_table() -> dict[int, Process]:
    """Return all processes by id (Linux; elsewhere none)."""
    table = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, group, session = file.read().rpartition(b")")[2].split()[:4]  # a name may hold anything
        except (OSError, ValueError):
            continue  # gone
        table[int(name)] = Process(int(parent), int(group), int(session), state.decode())
    return table


def members(table: dict[int, Process], ranks: set[int], marked: set[int] | None = None, subreaper: int = 0,
            excluded: set[int] | None = None) -> set[int]:
    """Return the live processes of a job.

    Args:
        ranks: process ids of the ranks, also of those that have ended.
        marked: processes known by their environment.
        subreaper: the launcher, when it adopts the job's orphans: its children are of the job, except `excluded`.
    """
    excluded = {os.getpid(), subreaper} | (excluded or set())
    found = (marked or set()) | {pid for pid, process in table.items()
                                 if pid in ranks or process.group in ranks or process.session in ranks}
    found -= excluded
    grown = True
    while grown:
        children = {pid for pid, process in table.items() if process.parent in found or process.parent == subreaper != 0}
        grown = not children - excluded <= found
        found |= children - excluded
    return {pid for pid in found if pid in table and table[pid].state not in "ZX"}


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


def kill_job(mark: bytes, ranks: set[int], timeout: float = TIMEOUT_SECONDS, subreaper: int = 0,
             excluded: set[int] | None = None) -> None:
    """Kill every process of a job, until there is none; arguments like `members`."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        alive = members(process_table(), ranks, set(marked_processes(mark)), subreaper, excluded)
        if not alive:
            return
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # gone, or it has become another user's
        time.sleep(0.02)


def main() -> None:
    """Wait for the launcher's end."""
    directory, mark = sys.argv[1], sys.argv[2].encode()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # a terminal's Ctrl-C is for the launcher
    told = sys.stdin.buffer.read().splitlines()
    if b"done" not in told:
        kill_job(mark, {int(line[5:]) for line in told if line.startswith(b"rank ")})
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
