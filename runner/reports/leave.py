"""`hvdrun --leave HOST`: let the ranks on a host leave a running elastic job of hvdrun on this host."""

from __future__ import annotations

import socket

import msgspec

from hvdlite.core.errors import LaunchError, ProtocolError
from hvdlite.core.sockets import connect_unix
from hvdlite.core.texts import printable
from hvdlite_runner.job.notices import LEAVE_SOCKET, Answer
from hvdlite_runner.reports.report import find_job


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
