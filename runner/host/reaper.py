"""The reaper ends a job whose launcher was killed. It uses the standard library only, so it starts in milliseconds.

    python reaper.py JOB_DIRECTORY MARK LIMIT STOPPED GRACE

It reads its standard input, whose other end only the launcher has open: a line "rank PID START" for each rank that is
started, "gone PID" for one whose process id the system may use again, and "done". An end without "done" means that the
launcher was killed: ranks get SIGTERM, and after GRACE seconds, or when they have ended, the reaper kills all processes of
the job, and removes the job's directory. It kills a launcher that has been stopped (SIGSTOP) for STOPPED seconds; inf for
never.

A process belongs to the job when it has MARK in its environment, has the LIMIT that the launcher sets for ranks, is in the
session or group of a rank, or descends from such a process. Each criterion alone can fail: by a cleaned environment (or a
rewritten title, which uses the same memory), by a program that sets limits, by setsid, by a parent that has ended.
"""

import contextlib
import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

TIMEOUT_SECONDS = 8.0
"""Seconds to go on killing; a process that keeps forking faster is given up."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at a launcher that may be stopped."""
PROC = "/proc"
"""Where Linux tells of processes; elsewhere `ps` does, and a process that has left its rank's group and lost its parent is
not found."""


class Process(NamedTuple):
    """A line of the process table."""

    parent: int
    group: int
    session: int
    state: str  # Z and X: has ended, and cannot be killed
    start: int = 0  # when it was started, in ticks since the host's start, or seconds (`ps`); a process id is used again


def _pids() -> list[int]:
    """Return the ids of all processes; none on systems other than Linux."""
    return [int(name) for name in os.listdir(PROC) if name.isdigit()] if os.path.isdir(PROC) else []


def _content(pid: int, name: str) -> bytes:
    """Return a file of a process in /proc; b"" when the process is gone, or somebody else's."""
    try:
        with open(f"{PROC}/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def process_table() -> dict[int, Process]:
    """Return all processes by id."""
    if not os.path.isdir(PROC):
        return _listed("-ax")
    return {pid: process for pid in _pids() if (process := look_up(pid)) is not None}


def look_up(pid: int) -> Process | None:
    """Return a process, or None when it is gone."""
    if not os.path.isdir(PROC):
        return _listed("-p", str(pid)).get(pid)
    fields = _content(pid, "stat").rpartition(b")")[2].split()  # names contain any character
    try:
        parent, group, session = map(int, fields[1:4])
        return Process(parent, group, session, fields[0].decode(), int(fields[19]))
    except (ValueError, IndexError):
        return None


def _listed(*which: str) -> dict[int, Process]:
    """Return processes by id as `ps` lists them where there is no /proc; their sessions are not known."""
    import subprocess  # only here: this program starts in milliseconds
    found = {}
    command = ["env", "LC_ALL=C", "ps", *which, "-o", "pid=,ppid=,pgid=,state=,lstart="]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ps:
        assert ps.stdout is not None
        for line in ps.stdout:
            pid, parent, group, state, *start = line.split()
            found[int(pid)] = Process(int(parent), int(group), 0, state[0], int(time.mktime(time.strptime(" ".join(start)))))
    found.pop(ps.pid, None)
    return found


def handles(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal; always False on systems other than Linux."""
    caught = _content(pid, "status").partition(b"SigCgt:")[2].split(maxsplit=1)[:1]
    return bool(caught and int(caught[0], 16) >> (signum - 1) & 1)


def members(table: dict[int, Process], ranks: set[int], marked: set[int] | None = None) -> set[int]:
    """Return the live processes of a job.

    Args:
        ranks: process ids of the ranks, also of those that have ended.
        marked: processes known by their environment or limit.
    """
    found = (marked or set()) | {pid for pid, process in table.items()
                                 if pid in ranks or process.group in ranks or process.session in ranks}
    found.discard(os.getpid())
    grown = True
    while grown:
        children = {pid for pid, process in table.items() if process.parent in found} - {os.getpid()}
        grown = not children <= found
        found |= children
    return {pid for pid in found if pid in table and table[pid].state not in "ZX"}


def limits_in_use() -> dict[int, int]:
    """Return the soft limit of message queues of each process that has one; none on systems other than Linux."""
    found = {}
    for pid in _pids():
        words = _content(pid, "limits").partition(b"Max msgqueue size")[2].split()
        if words and words[0].isdigit():  # else it is gone, or unlimited
            found[pid] = int(words[0])
    return found


def marked_processes(*marks: bytes) -> list[int]:
    """Return the ids of all live processes with all marks in their environment; none on systems other than Linux."""
    return [pid for pid in _pids() if pid != os.getpid() and set(marks) <= set(_content(pid, "environ").split(b"\0"))]


def kill_job(mark: bytes, ranks: dict[int, int], limit: int = 0, timeout: float = TIMEOUT_SECONDS) -> None:
    """Kill the processes of a job until none is left.

    Args:
        mark: an entry of their environment.
        ranks: the start of each rank, by process id.
        limit: their limit of message queues; 0 for none.
    """
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        table = process_table()
        current = {pid for pid, start in ranks.items() if pid not in table or table[pid].start == start}
        limited = {pid for pid, found in limits_in_use().items() if found == limit} if limit else set()
        alive = members(table, current, {*marked_processes(mark), *limited})
        if not alive:
            return
        kill_all(table, alive)
        time.sleep(0.02)


def let_end(ranks: dict[int, int], seconds: float) -> None:
    """Send SIGTERM to the ranks, and wait until they have ended.

    Args:
        ranks: the start of each, by process id.
        seconds: after which they are not waited for any more.
    """
    until, told = time.monotonic() + seconds, set[int]()
    while time.monotonic() < until and (left := [
            pid for pid, start in ranks.items()
            if (found := look_up(pid)) is not None and found.start == start and found.state not in "ZX"]):
        for pid in set(left) - told:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        told.update(left)
        time.sleep(0.02)


def kill_rank(marks: Iterable[bytes], rank: int) -> bool:
    """Kill the processes of one rank, as far as they are found now; return whether there was none.

    Args:
        marks: entries of the environment that together distinguish its processes from those of other ranks.
        rank: its process id, which must not have been reaped.
    """
    table = process_table()
    alive = members(table, {rank}, set(marked_processes(*marks)))
    kill_all(table, alive)
    return not alive


def kill_all(table: dict[int, Process], pids: Iterable[int]) -> None:
    """Kill processes of a table, and never one that has got the process id of another that has ended since.

    Reapers are spared: a job inside this one (an agent's on this host, or a job that a rank has started) has one, which ends
    by itself after the others and removes that job's directory.
    """
    for pid in pids:
        if _is_reaper(pid):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # an old Python, an old kernel, or the process is gone
            pidfd = -1
        try:
            now = look_up(pid)  # after the descriptor was opened: it is of this process, or of none
            if now is None or now.start != table[pid].start:
                continue
            _kill(pid, pidfd)
        except (ProcessLookupError, PermissionError):
            pass  # ended, or it runs as another user now
        finally:
            if pidfd >= 0:
                os.close(pidfd)


def _is_reaper(pid: int) -> bool:
    """Return whether a process runs this program."""
    words = _content(pid, "cmdline").split(b"\0")
    return words[1:3] == [b"-S", b"-E"] and words[3:] != [] and words[3].endswith(b"/reaper.py")


def _kill(pid: int, pidfd: int) -> None:
    """Kill a process by its descriptor, if there is one and it may be used (a sandbox may refuse that)."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended, and another process may have its id
    except (AttributeError, OSError):
        os.kill(pid, signal.SIGKILL)


def read_until_end(launcher: int, allowed: float) -> bytes:
    """Return what the launcher has written when it has ended; kill it when it has been stopped for too long.

    Looks are counted, not seconds: this process may have stood still, too, with its host.

    Args:
        allowed: seconds.
    """
    content, looks = b"", 0
    begun = look_up(launcher)
    while True:
        if select.select([0], [], [], LOOK_SECONDS if math.isfinite(allowed) else None)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                return content
            content += piece
            continue
        found = look_up(launcher)
        looks = looks + 1 if found is not None and found.state == "T" else 0
        if begun is not None and looks * LOOK_SECONDS >= allowed:
            kill_all({launcher: begun}, [launcher])


def main() -> None:
    """Wait for the end of the launcher."""
    directory, mark, limit = sys.argv[1], os.fsencode(sys.argv[2]), int(sys.argv[3])
    allowed, grace = map(float, sys.argv[4:])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # a terminal's Ctrl-C is for the launcher
    lines = [line.split() for line in read_until_end(os.getppid(), allowed).splitlines()]
    if [b"done"] not in lines:
        ranks: dict[int, int] = {}
        for line in lines:
            if line[0] == b"rank":
                ranks[int(line[1])] = int(line[2])
            elif line[0] == b"gone":
                ranks.pop(int(line[1]), None)
        let_end(ranks, grace)
        kill_job(mark, ranks, limit)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
