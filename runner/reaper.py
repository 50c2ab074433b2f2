"""The reaper ends a job whose launcher was killed. It uses the standard library only, so it starts in milliseconds.

    python reaper.py JOB_DIRECTORY MARK

It reads its standard input, whose other end only the launcher has open: a line "rank PID" for each rank that is started,
"gone PID" for one whose process id the system may use again, and "done". An end without "done" means that the launcher was
killed: the reaper kills all processes of the job, and removes the job's directory.

A process belongs to the job when it has MARK in its environment, is in the session or group of a rank, or descends from such
a process. Each criterion alone can fail: by a cleaned environment (or a rewritten title, which uses the same memory), by
setsid, by a parent that has ended.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

TIMEOUT_SECONDS = 8.0
"""Seconds to go on killing; a process that keeps forking faster is given up."""


class Process(NamedTuple):
    """A line of the process table."""

    parent: int
    group: int
    session: int
    state: str  # Z and X: has ended, and cannot be killed


def process_table() -> dict[int, Process]:
    """Return all processes by id; none on systems other than Linux."""
    table = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent, group, session = file.read().rpartition(b")")[2].split()[:4]  # names contain any character
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
        subreaper: the launcher, if it adopts the job's orphans: its children belong to the job, except `excluded`.
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


def marked_processes(*marks: bytes) -> list[int]:
    """Return the ids of all live processes with all marks in their environment; none on systems other than Linux."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if set(marks) <= set(file.read().split(b"\0")):
                    found.append(int(name))
        except OSError:
            continue  # gone, or somebody else's
    return found


def kill_job(mark: bytes, ranks: set[int], timeout: float = TIMEOUT_SECONDS, subreaper: int = 0,
             excluded: set[int] | None = None) -> None:
    """Kill the processes of a job until none is left; the arguments are those of `members`."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        alive = members(process_table(), ranks, set(marked_processes(mark)), subreaper, excluded)
        if not alive:
            return
        kill_all(alive)
        time.sleep(0.02)


def kill_rank(marks: Iterable[bytes], rank: int) -> bool:
    """Kill the processes of one rank, as far as they are found now; return whether there was none.

    Args:
        marks: entries of the environment that together tell its processes from those of other ranks.
        rank: its process id, which must not have been reaped.
    """
    alive = members(process_table(), {rank}, set(marked_processes(*marks)))
    kill_all(alive)
    return not alive


def kill_all(processes: Iterable[int]) -> None:
    """Kill processes by id."""
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # ended, or it runs as another user now


def main() -> None:
    """Wait for the end of the launcher."""
    directory, mark = sys.argv[1], sys.argv[2].encode()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # a terminal's Ctrl-C is for the launcher
    told = sys.stdin.buffer.read().splitlines()
    if b"done" not in told:
        ranks: set[int] = set()
        for line in told:
            if line.startswith(b"rank "):
                ranks.add(int(line[5:]))
            elif line.startswith(b"gone "):
                ranks.discard(int(line[5:]))
        kill_job(mark, ranks)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
