"""`hvdrun --monitor`: a table of the ranks, updated every second. `--scaling` uses its measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from hvdlite.core.errors import ProtocolError
from hvdlite.core.launch_contract import REPORT_SOCKET
from hvdlite.core.ledger import Ledger
from hvdlite.core.texts import printable
from hvdlite.diagnostics import progress
from hvdlite.diagnostics.slowness import LEAST_STEPS, Slowness, diagnose
from hvdlite_runner.messages import ProgressReply
from hvdlite_runner.output import format_ranks
from hvdlite_runner.placement import LOCAL
from hvdlite_runner.report import ask

STALL_SECONDS: Final = 2.0
"""Seconds without a step after which rank 0 is asked which ranks wait for which."""
WINDOW: Final = 20.0
"""Seconds over which ranks are compared, to see why they are slow; more where these have fewer than `LEAST_STEPS` steps."""
_KEPT: Final = 200  # updates with new ledgers, at most
_ASK_SECONDS: Final = 0.5
_GPU_SECONDS: Final = 2.0


class WorkerGroupLike(Protocol):
    """The part of a worker group that the monitor uses."""

    directory: str
    running: dict[int, Any]


class ProgressObserver:
    """A receiver of the ranks' progress, which does nothing with it."""

    def attach(self, write: Callable[[str], None], is_busy: Callable[[], bool]) -> None:
        """Begin with a job.

        Args:
            write: writes text to the terminal, after the job's output.
            is_busy: returns whether the terminal takes nothing at the moment.
        """

    def take(self, host: str, event: ProgressReply) -> None:
        """Take the progress of a host's ranks."""

    def ended(self, rank: int, reading: dict[str, Any]) -> None:
        """Take the last progress of a rank that has ended."""

    def clear_table(self) -> None:
        """Remove the table, because something else is about to be written on the terminal."""

    def finish(self) -> None:
        """End the output, because the job is over."""


def sample(workers: WorkerGroupLike) -> tuple[dict[int, dict[str, Any]], str]:
    """Return the readings of a host's processes, and, on rank 0's host while one waits, which ranks wait for which."""
    pids = {rank: process.pid for rank, process in workers.running.items()}
    loads = _gpu_loads(pids)
    ranks = {}
    for rank, pid in pids.items():
        ranks[rank] = {**reading_of(workers.directory, rank), "memory": resident(pid), "gpu": loads.get(pid, "")}
    waits = ""
    socket_path = Path(workers.directory) / REPORT_SOCKET  # on rank 0's host
    if any(each["idle"] > STALL_SECONDS for each in ranks.values()) and socket_path.exists():
        waits = _stall_summary(socket_path)
    return ranks, waits


def reading_of(directory: str, rank: int) -> dict[str, Any]:
    """Return the fields of a rank's `Reading`; `idle` is negative before its first step."""
    reading = progress.read(directory, rank)
    return {**dataclasses.asdict(reading), "idle": reading.idle if math.isfinite(reading.idle) else -1.0,
            "ledger": msgspec.to_builtins(reading.ledger)}


def resident(pid: int) -> int:
    """Return the bytes of memory that a process uses; 0 on systems other than Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _stall_summary(path: Path) -> str:
    """Ask rank 0; return "" when it does not answer immediately."""
    with contextlib.suppress(OSError, ValueError, KeyError, ProtocolError):
        return "\n".join(stall_lines(ask(path, _ASK_SECONDS)["report"]))
    return ""


def stall_lines(report: Mapping[str, Any]) -> list[str]:
    """Return a line with the longest wait of a stall report and its reason."""
    if not report["stalls"]:
        return []
    stall = max(report["stalls"], key=lambda each: float(each["waited_seconds"]))
    return [f"ranks {format_ranks(stall['submitted'])} wait for {format_ranks(stall['missing'])}: '{stall['name']}', "
            f"{stall['waited_seconds']:.0f} s", *(f"  {line}" for line in report["diagnosis"])]


def _gpu_loads(pids: Mapping[int, int]) -> dict[int, str]:
    """Return "load memory" of the GPU that each process uses, by process id; empty without nvidia-smi.

    In a container nvidia-smi may report other process ids; then the i-th rank is assumed to use the i-th GPU.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    cards = _nvidia_smi("gpu", "uuid,utilization.gpu,memory.used")
    load = {words[0]: words[1] for words in cards}
    apps = {int(pid): f"{load.get(uuid, '?')}% {memory} MiB" for pid, uuid, memory in _nvidia_smi(
        "compute-apps", "pid,gpu_uuid,used_memory") if pid.isdigit()}
    if any(pid in apps for pid in pids.values()):
        return apps
    ordered = [pids[rank] for rank in sorted(pids)]
    return {pid: f"{words[1]}% {words[2]} MiB" for pid, words in zip(ordered, cards, strict=False)}


def _nvidia_smi(subject: str, fields: str) -> list[list[str]]:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(["nvidia-smi", f"--query-{subject}={fields}", "--format=csv,noheader,nounits"],
                               capture_output=True, text=True, check=False, timeout=_GPU_SECONDS)
        return [[word.strip() for word in line.split(",")] for line in asked.stdout.splitlines()]
    return []


@dataclasses.dataclass(frozen=True)
class Row:
    """A rank in the table: rates over the last interval."""

    rank: int
    host: str
    steps: float  # per second
    samples: float  # per second; 0.0 when the script does not count them
    blocked: float  # share of the time in waits for collectives, 0..1
    idle: float  # seconds since its last step; negative before the first
    memory: int
    gpu: str


def rows(before: Mapping[int, dict[str, Any]], now: Mapping[int, dict[str, Any]], rank_hosts: Mapping[int, str],
         seconds: float) -> list[Row]:
    """Return the table's rows from two samples of the ranks' progress, `seconds` apart."""
    table = []
    for rank, each in sorted(now.items()):
        old = before.get(rank, each)
        samples = max(0, each["samples"] - old["samples"]) / seconds if each["counts_samples"] and seconds else 0.0
        table.append(Row(rank, rank_hosts.get(rank, ""), max(0, each["steps"] - old["steps"]) / seconds if seconds else 0.0,
                         samples, min(1.0, (each["blocked"] - old["blocked"]) / seconds) if seconds else 0.0,
                         each["idle"], each["memory"], each["gpu"]))
    return table


def text(table: list[Row], waits: str) -> list[str]:
    """Return the table's lines."""
    several, gpus = len({row.host for row in table}) > 1, any(row.gpu for row in table)
    lines = [f"{'rank':>4}{'  host' if several else '':<{16 if several else 0}} {'steps/s':>9} {'samples/s':>10} "
             f"{'in waits':>9} {'last step':>10} {'memory':>9}" + ("  GPU" if gpus else "")]
    for row in table:
        idle = "none yet" if row.idle < 0 else f"{row.idle:.1f} s ago" if row.idle > STALL_SECONDS else "now"
        lines.append(f"{row.rank:>4}{f'  {row.host}' if several else '':<{16 if several else 0}} {row.steps:>9.1f} "
                     f"{row.samples:>10,.0f} {row.blocked:>9.0%} {idle:>10} {row.memory / 2**20:>5.0f} MiB"
                     + (f"  {row.gpu}" if gpus else ""))
    total = sum(row.samples for row in table)
    if total:
        lines.append(f"all ranks: {total:,.0f} samples/s")
    if waits:
        lines += waits.splitlines()
    return lines


class Monitor(ProgressObserver):
    """Shows the table: in place on a terminal, below the ranks' output; elsewhere one table after the other.

    Args:
        write: writes text to the terminal, before `attach`.
        rank_hosts: each rank's host.
        in_place: whether the table may be overwritten.
    """

    def __init__(self, write: Callable[[str], None], rank_hosts: Mapping[int, str], in_place: bool,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._rank_hosts, self._in_place, self._clock = write, rank_hosts, in_place, clock
        self._now: dict[int, dict[str, Any]] = {}
        self._before: dict[int, dict[str, Any]] = {}
        self._when = clock()
        self._waits = ""
        self._drawn = 0
        self._ledgers: deque[tuple[float, dict[int, Ledger]]] = deque(maxlen=_KEPT)
        self._is_busy: Callable[[], bool] = lambda: False

    def attach(self, write: Callable[[str], None], is_busy: Callable[[], bool]) -> None:
        """Write with the job's output from now on; while the terminal takes nothing, leave tables out."""
        self._write, self._is_busy = write, is_busy

    def take(self, host: str, event: ProgressReply) -> None:
        """Add the progress of a host's ranks; the launcher's own host is the last one of each round."""
        self._now |= event.ranks
        self._waits = event.waits or self._waits
        if host != LOCAL:
            return
        now = self._clock()
        if self._now and now - self._when >= 0.9 and not self._is_busy():
            self.clear_table()
            lines = text(rows(self._before, self._now, self._rank_hosts, now - self._when), self._waits)
            slowness = self._slowness(now)
            if slowness is not None and not self._waits:
                lines.append(str(slowness))
            self._write("".join(f"{printable(line)}\n" for line in lines))
            self._drawn = len(lines)
            self._before, self._when, self._waits = dict(self._now), now, ""

    def _slowness(self, now: float) -> Slowness | None:
        """Return why the job has been slow lately."""
        last = {rank: msgspec.convert(each["ledger"], Ledger) for rank, each in self._now.items() if "ledger" in each}
        if not self._ledgers or last != self._ledgers[-1][1]:  # long steps change none for a while
            self._ledgers.append((now, last))
        while len(self._ledgers) > 1 and self._ledgers[1][0] <= now - WINDOW and _are_enough(self._ledgers[1][1], last):
            self._ledgers.popleft()
        return diagnose(_grown(self._ledgers[0][1], last))

    def clear_table(self) -> None:
        """Remove the table from the terminal; the next update writes it again, below other output."""
        if self._in_place and self._drawn:
            self._write(f"\x1b[{self._drawn}F\x1b[J")
        self._drawn = 0

    def ended(self, rank: int, reading: dict[str, Any]) -> None:
        """Remove the row of a rank that has ended."""
        self._now.pop(rank, None)

    def finish(self) -> None:
        """Leave the last table on the terminal."""
        self._drawn = 0


def _grown(first: Mapping[int, Ledger], last: Mapping[int, Ledger]) -> dict[int, Ledger]:
    return {rank: ledger.since(first[rank]) for rank, ledger in last.items() if rank in first}


def _are_enough(first: Mapping[int, Ledger], last: Mapping[int, Ledger]) -> bool:
    """Return whether the ranks that step have taken enough steps since the first ledgers, to be compared."""
    steps = [ledger.steps for ledger in _grown(first, last).values() if ledger.steps > 0]
    return min(steps, default=0) >= LEAST_STEPS


class ThroughputRecorder(ProgressObserver):
    """Records the ranks' last readings, for `--scaling`, `--sweep` and `--profile`."""

    def __init__(self) -> None:
        self.ranks: dict[int, dict[str, Any]] = {}

    def ended(self, rank: int, reading: dict[str, Any]) -> None:
        """Record a rank's last reading."""
        self.ranks[rank] = reading
