"""`hvdrun --report`: ask a running job on this host for a stall report; `--leave HOST`: let its ranks on a host leave."""

from __future__ import annotations

import datetime
import json
import os
import socket
import tempfile
import time
from pathlib import Path

import msgspec

from hvdlite.core.errors import LaunchError, ProtocolError
from hvdlite.core.launch_contract import DIRECTORY_PREFIX, PROCESSES_FILE, REPORT_SOCKET, is_private_directory
from hvdlite.core.sockets import connect_unix
from hvdlite.core.texts import printable
from hvdlite.diagnostics.process_probe import ProcessProbe
from hvdlite_runner.host.processes import ask
from hvdlite_runner.job.notices import LEAVE_SOCKET, Answer

TIMEOUT_SECONDS = 8.0
"""Seconds to wait for rank 0, which itself waits for the ranks' answers."""


def show_report(job: str, *, as_json: bool = False) -> int:
    """Print the report of a job; return the exit code: 0, or 1 when rank 0 did not answer.

    Without an answer, print each rank's state as the kernel and the C level report it.

    Args:
        job: the launcher's process id, or the job's directory; "" when there is only one job.

    Raises:
        LaunchError: when there is no such job, or several, or another user answers.
    """
    directory = find_job(job)
    try:
        answer = ask(directory / REPORT_SOCKET, TIMEOUT_SECONDS)
    except ProtocolError as error:
        raise LaunchError(f"{directory / REPORT_SOCKET} is not served by rank 0 of a job of yours: {error}") from None
    except (OSError, ValueError) as error:
        probe = _probe(directory)
        ranks = {rank: {"state": probe.state(rank), "stacks": probe.stacks(rank)} for rank in probe.ranks}
        reason = f"rank 0 does not answer ({error or 'no report'})"
        if as_json:
            print(json.dumps({"error": reason, "ranks": ranks}, indent=1))
        else:
            print(reason, *(f"rank {rank}: {said['state']}\n{said['stacks']}" for rank, said in ranks.items()), sep="\n")
        return 1
    print(json.dumps(answer["report"], indent=1) if as_json else answer["text"])
    return 0


def find_job(job: str, served: str = REPORT_SOCKET, option: str = "--report",
             otherwise: str = "Not all ranks of hvdrun process {} have met") -> Path:
    """Return the directory of a job whose ranks have met; see `show_report`.

    Args:
        served: the socket that is in it.
        option: that chooses one.
        otherwise: what may be the matter with the processes whose directories do not have it.
    """
    if os.sep in job or os.path.isdir(job):
        return _named_directory(Path(job))
    jobs = [(path.name.removeprefix(DIRECTORY_PREFIX).split("-")[0], path)
            for path in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*") if _is_own(path)]
    running = {pid: path for pid, path in jobs if (path / served).exists()}
    if job in running:
        return running[job]
    if running and not job:
        if len(running) == 1:
            return next(iter(running.values()))
        raise LaunchError("\n".join([f"several jobs are running on this host; choose one with {option} PID:",
                                     *(_summary(pid, path / served) for pid, path in sorted(running.items()))]))
    others = sorted({pid for pid, path in jobs if pid not in running and Path("/proc", pid).exists() and (
        served != REPORT_SOCKET or not (path / PROCESSES_FILE).exists())})
    told = (f"hvdrun process {job} has no running job on this host; running: {', '.join(running) or 'none'}" if job
            else "no job that you started with hvdrun is running on this host")
    raise LaunchError(told + (f". {otherwise.format(', '.join(others))}" if others else ""))


def _summary(pid: str, served: Path) -> str:
    """Return a line about a job: its hvdrun, its age, how many ranks it has on this host, and its command."""
    try:
        age = datetime.timedelta(seconds=round(time.time() - served.stat().st_mtime))
        command = Path("/proc", pid, "cmdline").read_bytes().rstrip(b"\0").split(b"\0")[1:]
        return f"    {pid}  {age}  {len(_probe(served.parent).ranks)} ranks  {os.fsdecode(b' '.join(command))}"
    except (OSError, LaunchError):  # it ends or begins just now, or there is no /proc
        return f"    {pid}"


def _is_own(path: Path) -> bool:
    """Return whether a path is a directory that only this user can enter; in /tmp, others make links and directories."""
    try:
        return is_private_directory(path.lstat())
    except OSError:  # the job has ended
        return False


def _named_directory(path: Path) -> Path:
    try:
        status = path.stat()
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}; name the process id of an hvdrun, or a job's directory") from None
    if not is_private_directory(status):
        raise LaunchError(f"{path} is not the directory of a job of yours: user {os.geteuid()} must own it, with mode 0700 "
                          f"(owner {status.st_uid}, mode {status.st_mode & 0o777:04o})")
    return path


def _probe(directory: Path) -> ProcessProbe:
    """Return a probe of the ranks of this host, as rank 0 has listed them."""
    path = directory / PROCESSES_FILE
    try:
        return ProcessProbe.read(str(path))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LaunchError(f"{directory} is not the directory of a running job whose ranks have met: rank 0 does not answer, "
                          f"and {PROCESSES_FILE} does not list the ranks ({error})") from None


def leave(host: str, job: str) -> int:
    """Ask for it, print what happens, and return the exit code: 0 when no rank is left on the host, or the job has ended.

    Args:
        job: the launcher's process id, or the job's directory; "" when there is only one elastic job.

    Raises:
        LaunchError: when there is no such job or host, or it cannot be left.
    """
    path = find_job(job, LEAVE_SOCKET, "--job", "Not elastic, or started on another host: process {}") / LEAVE_SOCKET
    answer = Answer("")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connect_unix(connection, str(path))
            connection.sendall(host.encode())
            connection.shutdown(socket.SHUT_WR)
            for line in connection.makefile("rb"):
                answer = msgspec.json.decode(line, type=Answer)
                if answer.code:
                    raise LaunchError(answer.text)
                print(printable(answer.text), flush=True)
        except (OSError, ProtocolError, msgspec.DecodeError) as error:
            raise LaunchError(f"{path} is not served by an elastic job of yours: {error}") from None
    if answer.code is None:
        print("the job has ended")
    return 0
