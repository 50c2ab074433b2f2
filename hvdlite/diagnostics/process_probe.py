"""The state and the stacks of a rank of this host that does not answer (docs/protocol.md#reports-on-demand).

At init a rank opens an anonymous file and registers it with `faulthandler`, which writes all stacks there upon a signal, in
C and without the GIL. Another process of the same user sends the signal and reads the file through /proc. Linux only; on
other systems nothing is known.
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

from hvdlite.core.kernel_files import open_memfd
from hvdlite.core.launch_contract import NO_STACK_DUMP, StackDumpTarget

WRITTEN_SECONDS: Final = 0.3
"""Seconds that a rank has to write its stacks."""
_LOOK_SECONDS: Final = 0.01
_FILE_NAME: Final = "hvdlite-stacks"

STATES: Final = {"T": "stopped (SIGSTOP, or a full terminal): kill -CONT {pid}", "t": "stopped by a debugger",
                 "D": "blocked in the kernel (a disk or a network file system?)", "Z": "dead, and not yet collected",
                 "R": "running, and something in it holds the GIL",
                 "S": "asleep, and something in it holds the GIL"}


class ProcessProbe:
    """Reads the state and the stacks of processes of this host, without their help.

    Args:
        pids: process ids, by rank.
        stack_dumps: by rank.
    """

    def __init__(self, pids: Mapping[int, int], stack_dumps: Mapping[int, StackDumpTarget]) -> None:
        self._pids, self._stack_dumps = dict(pids), dict(stack_dumps)

    @classmethod
    def read(cls, path: str) -> ProcessProbe:
        """Return a probe of the processes in a file that `write` has written."""
        with open(path, encoding="ascii") as file:
            ranks = {int(rank): entry for rank, entry in json.load(file).items()}
        return cls({rank: pid for rank, (pid, _, _) in ranks.items()},
                   {rank: StackDumpTarget(descriptor, number) for rank, (_, descriptor, number) in ranks.items()})

    def write(self, path: str) -> None:
        """Write the process ids and stack dump targets to a file, for another process."""
        with open(path, "w", encoding="ascii") as file:
            json.dump({rank: [pid, *self._stack_dumps.get(rank, NO_STACK_DUMP)] for rank, pid in self._pids.items()}, file)

    @property
    def ranks(self) -> list[int]:
        """The ranks of this host, in ascending order."""
        return sorted(self._pids)

    def state(self, rank: int) -> str:
        """Return the kernel's state of a rank's process as a clause, or "" when the rank is on another host."""
        pid = self._pids.get(rank)
        if pid is None:
            return ""
        with contextlib.suppress(OSError, IndexError):
            code = _state_code(pid)
            return f"its process {pid} is " + STATES.get(code, f"in state {code}").format(pid=pid)
        return f"its process {pid} cannot be seen"

    def stacks(self, rank: int) -> str:
        """Return the stacks of all threads of a rank, innermost frames first; "" when it cannot tell."""
        pid = self._pids.get(rank)
        descriptor, number = self._stack_dumps.get(rank, NO_STACK_DUMP)
        if pid is None or not number:
            return ""
        with contextlib.suppress(OSError, IndexError):
            if _state_code(pid) in "Tt":  # it would write when it goes on, of threads that run: that can crash it
                return ""
            path = f"/proc/{pid}/fd/{descriptor}"
            if not _catches(pid, number) or not os.readlink(path).startswith(f"/memfd:{_FILE_NAME}"):
                return ""  # the signal would end the process, or another process has got the rank's id since
            with open(path, encoding="utf-8", errors="replace") as file:
                file.seek(0, os.SEEK_END)
                os.kill(pid, number)
                return _until_quiet(file.fileno(), file.tell())
        return ""


def enable_stack_dump(number: int) -> StackDumpTarget:
    """Let this process write its stacks upon signal `number`; return where it does.

    When the process handles or ignores that signal already, or the system has no anonymous files, nothing changes and the
    target is nowhere.
    """
    if not number or signal.getsignal(number) is not signal.SIG_DFL:
        return NO_STACK_DUMP
    descriptor = open_memfd(_FILE_NAME)
    if descriptor < 0:
        return NO_STACK_DUMP
    faulthandler.register(number, file=descriptor, all_threads=True)
    return StackDumpTarget(descriptor, number)


def _state_code(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]


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
