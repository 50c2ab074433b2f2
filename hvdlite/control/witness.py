"""What the kernel and the C level can tell about a rank of this host that does not answer.

A rank opens a nameless file at init and lets `faulthandler` write all its stacks there upon a signal: at the C level,
without Python's lock. Whoever may see the process can ask for them, through /proc. Linux only; elsewhere nothing is known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import time
from collections.abc import Mapping
from typing import Final

WRITTEN_SECONDS: Final = 0.3
"""How long a rank gets to write its stacks."""
_LOOK_SECONDS: Final = 0.01

STATES: Final = {"T": "stopped (SIGSTOP, or a full terminal): kill -CONT {pid}", "t": "stopped by a debugger",
                 "D": "blocked in the kernel (a disk or a network file system?)", "Z": "dead, and not yet collected",
                 "R": "running, with Python's lock held by something in it",
                 "S": "asleep, with Python's lock held by something in it"}


class Witness:
    """Asks about processes.

    Args:
        pids: by rank; only those of this host.
        testimonies: by rank; where each writes its stacks: descriptor and signal, (-1, 0) for nowhere.
    """

    def __init__(self, pids: Mapping[int, int], testimonies: Mapping[int, tuple[int, int]]) -> None:
        self._pids, self._testimonies = dict(pids), dict(testimonies)

    @classmethod
    def read(cls, path: str) -> Witness:
        """Return the witness that wrote a file."""
        with open(path, encoding="ascii") as file:
            ranks = {int(rank): entry for rank, entry in json.load(file).items()}
        return cls({rank: pid for rank, (pid, _, _) in ranks.items()},
                   {rank: (descriptor, number) for rank, (_, descriptor, number) in ranks.items()})

    def write(self, path: str) -> None:
        """Write down whom it knows, for another process."""
        with open(path, "w", encoding="ascii") as file:
            json.dump({rank: [pid, *self._testimonies.get(rank, (-1, 0))] for rank, pid in self._pids.items()}, file)

    @property
    def ranks(self) -> list[int]:
        """Whom it knows."""
        return sorted(self._pids)

    def state(self, rank: int) -> str:
        """Say what the kernel knows of a rank, or "" when it is not of this host."""
        pid = self._pids.get(rank)
        if pid is None:
            return ""
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                code = file.read().rpartition(")")[2].split()[0]
            return f"its process {pid} is " + STATES.get(code, f"in state {code}").format(pid=pid)
        return f"its process {pid} cannot be seen"

    def stacks(self, rank: int) -> str:
        """Return the stacks of all threads of a rank, innermost frames first; "" when it cannot tell."""
        pid = self._pids.get(rank)
        descriptor, number = self._testimonies.get(rank, (-1, 0))
        if pid is None or not number:
            return ""
        with contextlib.suppress(OSError):
            if not _catches(pid, number):  # it would end the process
                return ""
            with open(f"/proc/{pid}/fd/{descriptor}", encoding="utf-8", errors="replace") as file:
                file.seek(0, os.SEEK_END)
                os.kill(pid, number)
                return _until_quiet(file.fileno(), file.tell())
        return ""


def testify(number: int) -> tuple[int, int]:
    """Let this process write its stacks upon signal `number`; return what a `Witness` must know, (-1, 0) if it cannot be.

    A signal that somebody handles, or ignores, is left alone.
    """
    if not number or not hasattr(os, "memfd_create") or signal.getsignal(number) is not signal.SIG_DFL:
        return -1, 0
    descriptor = os.memfd_create("hvdlite-stacks", os.MFD_CLOEXEC)
    faulthandler.register(number, file=descriptor, all_threads=True)
    return descriptor, number


def _catches(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        caught = next(line for line in file if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def _until_quiet(descriptor: int, begin: int) -> str:
    deadline, seen = time.monotonic() + WRITTEN_SECONDS, begin
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        end = os.fstat(descriptor).st_size
        if end == seen > begin:
            break
        seen = end
    return os.pread(descriptor, max(0, seen - begin), begin).decode("utf-8", "replace")
