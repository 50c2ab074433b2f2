"""Elastic jobs of `programs/member.py` for the tests: started, told what to do, and read line by line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdlite_runner.host.reaper import marked_processes
from tests.worlds import HANGS_SECONDS, HVDRUN, SHRINKS, clean_environment

PROGRAM = str(Path(__file__).parent / "programs" / "member.py")


class Job:
    """An hvdrun with output that is read line by line.

    Args:
        folder: an empty folder, with a short name: sockets are in it.
        launcher: the command that runs hvdrun; default: on this machine.
    """

    def __init__(self, folder: Path, *flags: str, launcher: Sequence[str] = (), program: Sequence[str] = (),
                 environment: Mapping[str, str] | None = None) -> None:
        self.folder, self.lines, self.members = folder, [], {}  # type: ignore[var-annotated]
        (folder / "tmp").mkdir(exist_ok=True)
        self._mark = f"TEST_JOB={folder}"
        shrinks = [] if "--blacklist-cooldown-range" in flags else SHRINKS
        self.process = subprocess.Popen(
            [*(launcher or HVDRUN), *shrinks, *flags, *(program or [sys.executable, PROGRAM, str(folder)])],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**(environment or clean_environment()), "OMP_NUM_THREADS": "1", "TEST_JOB": str(folder),
                 "TMPDIR": str(folder / "tmp")})

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        until = time.monotonic() + HANGS_SECONDS
        while left := marked_processes(self._mark.encode()):
            if time.monotonic() > until:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError([Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left])
            time.sleep(0.01)
        while left_files := list((self.folder / "tmp").glob("hvdlite-*")):  # reapers remove them last
            assert time.monotonic() < until, left_files
            time.sleep(0.01)

    def wait_for(self, text: str, times: int = 1) -> str:
        """Read lines until `text` has come so many times; return the last one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            times -= text in line
            if not times:
                return self.lines[-1]
        raise AssertionError(f"{text!r} did not come: {self.text}")

    def tell(self, member: int, words: str) -> None:
        """Let a member do something; see `programs/member.py`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(words.encode(), str(self.folder / str(member)))

    def end(self) -> int:
        """Wait for the end of hvdrun; return its exit code."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()  # `communicate` would lose what has been read ahead
        return self.process.wait(HANGS_SECONDS)

    @property
    def text(self) -> str:
        """All output that has been read."""
        return "\n".join(self.lines)


class HostsFile:
    """The hosts that a discovery program prints."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hosts"
        self.flags = ("--host-discovery-script", f"cat {self.path}")

    def write(self, *lines: str) -> None:
        """Replace the file at once."""
        (self.path.parent / "new").write_text("".join(f"{line}\n" for line in lines))
        (self.path.parent / "new").rename(self.path)


def begun(line: str) -> list[str]:
    """Return what a member's first line says: id, pid, rank, size, local rank, slot, host, whether elastic, and a joiner."""
    return line.partition("begun ")[2].split()
