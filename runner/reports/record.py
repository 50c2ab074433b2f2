"""`hvdrun --record FILE.jsonl`: what happens in a job, as JSON lines. Their fields: docs/launching.md#records-and-metrics.

A record is at most `AT_ONCE` and `A_DAY` bytes for each day so far. In a large job samples therefore become rarer with time,
and cover more of it: of 64 ranks one is written each second for about ten minutes, then one in eight seconds.

`hvdrun --report FILE.jsonl`: what a record tells of its jobs, also of those that have crashed.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from hvdlite.core.errors import LaunchError
from hvdlite.core.texts import printable, shortened
from hvdlite.diagnostics.progress import Reading
from hvdlite.diagnostics.slowness import Slowness
from hvdlite_runner.output.streams import OutputTarget, Queue
from hvdlite_runner.placement import format_ranks
from hvdlite_runner.reports.metrics import MetricsServer, metrics_text
from hvdlite_runner.reports.monitor import RankFigures

A_DAY: Final = 9_000_000
AT_ONCE: Final = 1_000_000
"""Half of it only for lines that are written once."""
_AT_THE_END: Final = 500  # bytes of it, for the last two lines
_LONGEST: Final = 1000  # characters of a line of hvdrun's
_FIRST: Final = b'{"kind":"job"'
_STALL_SECONDS: Final = 10.0  # more than a usual step
_END_SECONDS: Final = 5.0  # for a disk that is slow


class RecordFile:
    """The lines of a job, added to a file by a thread, so that a slow disk delays nothing.

    Raises:
        LaunchError: for a file that cannot be written, or is something else.

    Attributes:
        left_out: lines for which there was no room, without those that may fail.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begun, self._size, self.left_out = clock, clock(), 0, 0
        self._target, self._queue = OutputTarget(_opened(path), f"--record {path}"), Queue(lambda: None)
        self._queue.start()
        self._is_closed = False

    def add(self, kind: str, fields: Mapping[str, Any], *, may_fail: bool = False, is_last: bool = False) -> bool:
        """Add a line; return False if there is no room for it yet. For the last ones there always is."""
        seconds = self._clock() - self._begun
        content = {"kind": kind, "seconds": round(seconds, 2), "time": round(time.time(), 2), **fields}
        line = json.dumps(content, separators=(",", ":")).encode() + b"\n"
        room = A_DAY * seconds / 86400 + (AT_ONCE / 2 if may_fail else AT_ONCE - _AT_THE_END)
        if self._size + len(line) > room and not is_last:
            self.left_out += not may_fail
            return False
        self._size += len(line)
        self._queue.put(self._target, line)
        return True

    def problem(self) -> str:
        """Return a line for the user about a file that has ended early, once; "" otherwise."""
        if self._queue.failed:
            self._queue.failed.popleft()
            reason = self._target.reason()
        elif self._is_closed and self._queue.waiting:
            reason = f"the disk takes nothing for {_END_SECONDS:.0f} s"
        else:
            return ""
        return printable(f"hvdrun: {self._target.label}: {reason}; the record ends here") + "\n"

    def close(self) -> None:
        """Wait until everything is written, but not for long, and close the file. See `problem` then."""
        self._queue.put(self._target, None)
        until = time.monotonic() + _END_SECONDS
        while not self._queue.is_idle() and time.monotonic() < until:
            time.sleep(0.01)
        self._queue.end()
        self._is_closed = True


def _opened(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "another hvdrun writes this file" if isinstance(error, BlockingIOError) else error.strerror
        raise LaunchError(f"--record {path}: {why}") from None
    status = os.fstat(descriptor)
    is_regular = stat.S_ISREG(status.st_mode)
    if not is_regular or (status.st_size and os.pread(descriptor, len(_FIRST), 0) != _FIRST):
        raise LaunchError(f"--record {path} is {'there, and no record' if is_regular else 'no file'}: give another name "
                          "(records of several jobs may be in one file)")
    if status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b"\n":
        os.write(descriptor, b"\n")  # a crash has cut off the last line
    return descriptor


class Recorder(RankFigures):
    """Writes a job's record, and gives a server its metrics.

    Args:
        file, metrics: None where these are not wanted.
    """

    def __init__(self, command: Sequence[str], file: RecordFile | None, metrics: MetricsServer | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._file, self._metrics = file, metrics
        self._world, self._slow, self._is_stalled = 0, ("", -1), False
        self._waited_not = clock()  # when last no rank waited for long
        self._add("job", {"command": list(command), "host": socket.gethostname(), "pid": os.getpid()})

    def attach(self, write: Callable[[str], None], is_busy: Callable[[], bool]) -> None:
        """Report on the job's terminal where the metrics are, and later a file that cannot be written."""
        self._write = write
        if self._metrics is not None:
            write(f"hvdrun: metrics at {self._metrics.url}\n")

    def begin_world(self, rank_hosts: Mapping[int, str]) -> None:
        """Write who is in another world."""
        super().begin_world(rank_hosts)
        self._world, self._slow = self._world + 1, ("", -1)
        self._waited_not, self._is_stalled = self._when, False
        hosts = {host: format_ranks(rank for rank in rank_hosts if rank_hosts[rank] == host) for host in rank_hosts.values()}
        self._add("world", {"number": self._world, "ranks": hosts})

    def _show(self, now: float, slowness: Slowness | None) -> None:
        if self._metrics is not None:
            self._metrics.text = metrics_text(self._world, self._now, slowness)
        found = ("", -1) if slowness is None else (slowness.cause, slowness.rank)
        fields = {"text": "no rank is slow any more"} if slowness is None else slowness.as_dict()
        is_known = slowness is not None or len(self._now) == len(self._rank_hosts)  # ended ranks are compared with none
        if found != self._slow and is_known and self._add("slowness", fields, may_fail=True):
            self._slow = found
        self._look_for_stall(now)
        if not self._before or self._add("sample", self._sample(now - self._when), may_fail=True):
            self._before, self._when = dict(self._now), now

    def _look_for_stall(self, now: float) -> None:
        waits, self._waits = self._waits, ""
        if not waits:
            self._waited_not, self._is_stalled = now, False
        ledgers = [each.reading.ledger for each in self._now.values()]
        usual = max((each.seconds / each.steps for each in ledgers if each.steps), default=0.0)
        if not self._is_stalled and now - self._waited_not > _STALL_SECONDS + usual:
            self._is_stalled = self._add("stall", {"text": waits}, may_fail=True)

    def _sample(self, seconds: float) -> dict[str, Any]:
        readings = {rank: each.reading for rank, each in self._now.items()}
        old = {rank: self._before.get(rank, each).reading for rank, each in self._now.items()}
        waits = {rank: (new.blocked - old[rank].blocked) / seconds for rank, new in readings.items()}
        size, counted = len(self._rank_hosts), any(each.counts_samples for each in readings.values())
        return {
            "over": round(seconds, 2), "unit": "samples/s" if counted else "batches/s",
            "rate": round(sum(max(0, new.samples - old[rank].samples) for rank, new in readings.items()) / seconds, 1),
            "waits": [round(min(1.0, max(0.0, waits[rank])), 2) if rank in waits else None for rank in range(size)],
            "memory": [self._now[rank].memory >> 20 if rank in readings else None for rank in range(size)],
            "replica_checks": max(each.replica_checks for each in readings.values()),
            "replica_mismatches": max(each.replica_mismatches for each in readings.values())}

    def ended(self, rank: int, reading: Reading) -> None:
        """Write the last progress of a rank."""
        super().ended(rank, reading)
        self._add("rank", {"rank": rank, "steps": reading.steps, "samples": reading.samples,
                           "waits": round(reading.blocked, 2), "memory": reading.peak,
                           "replica_checks": reading.replica_checks, "replica_mismatches": reading.replica_mismatches})

    def noted(self, text: str) -> None:
        """Write a line of hvdrun's."""
        self._add("note", {"text": shortened(text, _LONGEST)})

    def closed(self, code: int | None) -> None:
        """Write how the job has ended."""
        if self._metrics is not None:
            self._metrics.close()
        if self._file is not None:
            if self._file.left_out:
                text = f"{self._file.left_out:,} lines were left out: the record had no room for them"
                self._file.add("note", {"text": text}, is_last=True)
            self._file.add("end", {"exit_code": code}, is_last=True)
            self._file.close()
            print(self._file.problem(), end="", file=sys.stderr)  # the job's output has ended

    def _add(self, kind: str, fields: Mapping[str, Any], *, may_fail: bool = False) -> bool:
        if self._file is None:
            return True
        if problem := self._file.problem():
            self._write(problem)
        return self._file.add(kind, fields, may_fail=may_fail)


ROWS: Final = 12
"""Of the throughput over time, at most."""
Line = dict[str, Any]
_CHECKS: Final = {"replica_checks": int, "replica_mismatches": int}
_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "job": {"host": str, "command": list[str]}, "world": {"number": int, "ranks": dict[str, str]},
    "sample": {"over": float, "unit": str, "rate": float, "waits": list[float | None], "memory": list[int | None]} | _CHECKS,
    "rank": {"rank": int, "memory": int, **_CHECKS}, "end": {"exit_code": int | None}}
"""What is read of a line, by kind."""


def show_record(path: str, *, as_json: bool = False) -> int:
    """Print what a record tells of each of its jobs, or the lines of each as JSON; return 0.

    Raises:
        LaunchError: when it cannot be read, or has no job.
    """
    try:
        jobs = jobs_in(Path(path).read_bytes().splitlines())
    except OSError as error:
        raise LaunchError(f"cannot read the record {path}: {error.strerror}") from None
    if not jobs:
        raise LaunchError(f"{path} has no job: it is no file of hvdrun --record")
    try:
        if as_json:
            print(json.dumps(jobs, indent=1))
        else:
            print(*(printable(line) for job in jobs for line in report(job)), sep="\n")
        sys.stdout.flush()
    except BrokenPipeError:  # head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def jobs_in(lines: Iterable[bytes]) -> list[list[Line]]:
    """Return the lines of each job of a record, without what is cut off or incomplete."""
    jobs: list[list[Line]] = []
    for text in lines:
        try:
            line = json.loads(text)
            for name, kind in {"seconds": float, "time": float, **_FIELDS.get(line["kind"], {})}.items():
                msgspec.convert(line[name], kind)
        except (ValueError, TypeError, KeyError):
            continue
        jobs += [[]] if line["kind"] == "job" else []
        for job in jobs[-1:]:
            job.append(line)
    return jobs


def report(lines: list[Line]) -> Iterator[str]:
    """Yield what the lines of a job tell: its end, the throughput over time, waits, memory, checks of replicas, events."""
    samples, ended = ([line for line in lines if line["kind"] == kind] for kind in ("sample", "rank"))
    end = "its end is not recorded: hvdrun was killed, or runs on"
    if lines[-1]["kind"] == "end":
        code = lines[-1]["exit_code"]
        end = "it could not begin" if code is None else f"it ended with exit code {code}"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lines[0]["time"]))
    yield f"job on {lines[0]['host']}, {began}: {' '.join(lines[0]['command'])}"
    yield f"recorded for {lines[-1]['seconds']:,.1f} s; {end}"
    count = min(ROWS, len(samples))
    for row in (samples[index * len(samples) // count:(index + 1) * len(samples) // count] for index in range(count)):
        rate = sum(sample["rate"] * sample["over"] for sample in row) / _seconds(row)
        yield f"{row[0]['seconds'] - row[0]['over']:>9,.0f} to {row[-1]['seconds']:,.0f} s: {rate:,.1f} {row[-1]['unit']}"
    waits, present, memory = dict[int, float](), dict[int, float](), dict[int, int]()
    for sample in samples:
        for rank, (part, mebibytes) in enumerate(zip(sample["waits"], sample["memory"], strict=False)):
            if part is not None:
                waits[rank] = waits.get(rank, 0.0) + part * sample["over"]
                present[rank] = present.get(rank, 0.0) + sample["over"]
                memory[rank] = max(memory.get(rank, 0), mebibytes or 0)
    for line in ended:
        memory[line["rank"]] = max(memory.get(line["rank"], 0), line["memory"] >> 20)
    if waits:
        shares = ((rank, waits[rank] / (present[rank] or 1.0)) for rank in sorted(waits))
        yield "in waits: " + ", ".join(f"rank {rank} {share:.0%}" for rank, share in shares)
    if memory:
        yield "most memory: " + ", ".join(f"rank {rank} {peak:,} MiB" for rank, peak in sorted(memory.items()))
    checks, unequal = (max((line[name] for line in samples + ended), default=0)
                       for name in ("replica_checks", "replica_mismatches"))
    if checks:
        yield f"replica checks: {checks}, of which {unequal} found a difference"
    for line in lines:
        if line["kind"] == "world":
            hosts = (f"ranks {ranks} on {host}" for host, ranks in line["ranks"].items())
            yield f"{line['seconds']:>9,.1f} s  world {line['number']}: {', '.join(hosts)}"
        elif "text" in line:
            yield f"{line['seconds']:>9,.1f} s  {'hvdrun: ' if line['kind'] == 'note' else ''}{line['text']}"


def _seconds(samples: Iterable[Line]) -> float:
    return sum(float(sample["over"]) for sample in samples) or 1.0
