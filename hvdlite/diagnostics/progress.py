"""A rank's counters and metrics, which the launcher reads from files in the job's directory.

`hvdrun --monitor` reads counters of steps, samples and waits. A rank writes a few numbers a step and makes no system call
for it; the launcher reads them when it wants to. At most once a second, with a step, a rank reads how long its thread has
run and could have run: that is its ledger. `hvdrun --sweep ... --until` reads, when a rank has ended, the metrics that its
script has recorded after evaluations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import mmap
import os
import resource
import statistics
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from hvdlite.core.launch_contract import METRICS_FILE, PROGRESS_FILE
from hvdlite.core.ledger import Ledger, Traffic
from hvdlite.diagnostics.slowness import LEAST_STEPS
from hvdlite.diagnostics.tcp_traffic import TcpTraffic

_HEAD: Final = struct.Struct("=QQQd")  # steps, samples, whether samples are counted, time of the last step
_BLOCKED: Final = struct.Struct("=dd")  # seconds blocked, which never become fewer; since when they become more, or 0
_STEP: Final = struct.Struct("=dd")  # seconds, samples
KEPT: Final = 4096
"""Steps whose times are kept."""
_LEDGER: Final = struct.Struct("=dQddddddQddd")  # the numbers of `Ledger`, since the first step
_COUNTS: Final = struct.Struct("=QQQ")  # bytes of memory, checks of replicas, those that found a difference
_TRAFFIC: Final = struct.Struct("=H4094s")  # how many bytes; the traffic of `Ledger`, as JSON
_ALL: Final = struct.Struct("=" + "".join(part.format[1:] for part in (_HEAD, _BLOCKED, _LEDGER, _COUNTS, _TRAFFIC)))
_COUNTS_AT: Final = _HEAD.size + _BLOCKED.size + _LEDGER.size
_TRAFFIC_AT: Final = _COUNTS_AT + _COUNTS.size
_TIMES: Final = _TRAFFIC_AT + _TRAFFIC.size  # where the steps begin
_SIZE: Final = _TIMES + KEPT * _STEP.size
WARM_UP: Final = 3
"""First steps that do not count for the rate."""
PAUSE: Final = 10.0
"""A step that took so many times the median was none: an evaluation, a checkpoint."""
LEDGER_SECONDS: Final = 1.0
"""How often the ledger is written, at most, after the first second with steps."""
WINDOW_SECONDS: Final = 30.0
"""What `Progress.ledger` is about."""
NOTHING: Final = Ledger()


class Evaluation(NamedTuple):
    """What a script has recorded after an evaluation."""

    seconds: float  # since `hvd.init()`
    epoch: float  # epochs trained by then
    metrics: dict[str, float]


class Schedule:
    """What the kernel tells of the thread that trains.

    Where a framework trains in threads of its own, steps are counted in one of them: then of all threads of the process.

    Args:
        threads: a directory for each thread of the process.
    """

    def __init__(self, threads: Path = Path("/proc/self/task")) -> None:
        self._threads = threads
        self._queued = 0  # nanoseconds of all threads, also of those that have ended
        self._seen: dict[str, int] = {}  # of each thread that lives

    def read(self) -> tuple[float, float]:
        """Return the seconds that it was running, and that it could have but was not; 0 where that is not known."""
        if threading.current_thread() is threading.main_thread():
            try:
                running, queued = _times(Path("/proc/thread-self"))
            except (OSError, ValueError):  # not Linux, or a kernel without it
                return time.thread_time(), 0.0
            return running * 1e-9, queued * 1e-9
        return time.process_time(), self._queued_in_all() * 1e-9

    def _queued_in_all(self) -> int:
        seen, self._seen = self._seen, {}
        with contextlib.suppress(OSError):  # not Linux
            for thread in list(self._threads.iterdir()):
                with contextlib.suppress(OSError, ValueError):  # it has just ended
                    self._seen[thread.name] = queued = _times(thread)[1]
                    self._queued += max(0, queued - seen.get(thread.name, 0))
        return self._queued


def _times(thread: Path) -> tuple[int, int]:
    running, queued = (thread / "schedstat").read_bytes().split()[:2]
    return int(running), int(queued)


class Progress:
    """A rank's own side.

    Attributes:
        steps: so far, as `Reading` counts them.
        input: seconds that the thread that trains has waited for batches.
        blocked: seconds in waits that are over.
    """

    def __init__(self) -> None:
        self._metrics_path: Path | None = None  # one evaluation a line, as JSON
        self._published = 0.0
        self.blocked = self._shown = self._since = 0.0  # what a launcher reads is never less than before
        self._memory: bytearray | mmap.mmap = bytearray(_SIZE)
        self.steps = self._samples = 0
        self._counts_samples = False
        self._last = 0.0
        self._collecting = self._collection_begun = 0.0
        self.input = self._input_cpu = 0.0
        self._absent = self._replica_checks = self._replica_mismatches = 0
        self._parts = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._is_watching = False
        self._thread = 0  # the one that trains, once it is known
        self._begun = 0.0
        self._schedule = Schedule()
        self._traffic: TcpTraffic | None = None
        self._first = Ledger()  # what the thread had used before the first step
        self._ledgers: deque[tuple[float, Ledger]] = deque(maxlen=int(2 * WINDOW_SECONDS / LEDGER_SECONDS))

    def watch(self, *, traffic: bool = False) -> None:
        """From now on count the time of garbage collections and, if wanted, what is sent to other hosts."""
        self._traffic = TcpTraffic() if traffic else None
        if not self._is_watching:
            self._is_watching = True
            gc.callbacks.append(self._collect)

    def publish(self, job_directory: str, rank: int) -> None:
        """From now on let others on this host read it, unless there is no room for the file: no job depends on it."""
        self._metrics_path, self._published = Path(job_directory) / f"{METRICS_FILE}.{rank}", time.monotonic()
        path = Path(job_directory) / f"{PROGRESS_FILE}.{rank}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, _SIZE)  # no room is an error now, not a signal later
            else:
                os.ftruncate(descriptor, _SIZE)
            self._memory = mmap.mmap(descriptor, _SIZE)
        except OSError:  # a full disk, or `ulimit -f`
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
        self._write()

    def withdraw(self) -> None:
        """From now on nobody reads it; what was written last stays in the file."""
        self._write_counts()
        if self._is_watching:
            self._is_watching = False
            gc.callbacks.remove(self._collect)
        memory, self._memory = self._memory, bytearray(self._memory)
        if isinstance(memory, mmap.mmap):
            memory.close()

    def record_metrics(self, metrics: Mapping[str, Any], epoch: float) -> None:
        """Record an evaluation, unless no launcher reads it or there is no room for it: no job depends on it.

        Raises:
            ValueError: for a metric that is not a number, or an epoch below 0.
        """
        numbers = {str(name): _number(f"metric {name!r}", value) for name, value in metrics.items()}
        epoch = _number("the epoch", epoch)
        if not epoch >= 0:
            raise ValueError(f"the epoch is the number of epochs trained so far, which cannot be {epoch:g}")
        if self._metrics_path is not None:
            line = json.dumps(Evaluation(time.monotonic() - self._published, epoch, numbers))
            with contextlib.suppress(OSError), open(self._metrics_path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def block(self) -> float:
        """The script begins to wait for a collective; return what `unblock` wants."""
        now = time.monotonic()
        self._show_blocked(now, is_blocked=True)
        return now

    def unblock(self, begun: float) -> None:
        """It goes on. With several threads that wait, each counts."""
        now = time.monotonic()
        self.blocked += now - begun
        self._show_blocked(now, is_blocked=False)

    def _show_blocked(self, now: float, *, is_blocked: bool) -> None:
        """Let others read it; where a wait was shorter than it seemed while it went on, the next ones make up for it."""
        shown = self._shown + (max(0.0, now - self._since) if self._since else 0.0)
        self._shown = shown = max(shown, self.blocked)
        self._since = now + shown - self.blocked if is_blocked else 0.0
        _BLOCKED.pack_into(self._memory, _HEAD.size, shown, self._since)

    def round(self) -> None:
        """An optimizer has stepped; counts as long as nobody counts samples."""
        if not self._counts_samples:
            self._step(1)

    def step(self, samples: int) -> None:
        """A step over so many samples of this rank is done."""
        if not self._counts_samples:
            self._counts_samples, self.steps, self._samples, self._last = True, 0, 0, 0.0
            self._ledgers.clear()  # they count other steps
        self._step(samples)

    def loaded(self, seconds: float, cpu: float) -> None:
        """The script has got a batch, for which it has waited; `cpu` seconds of that it was running.

        Other threads than the one that trains load ahead, and do not count.
        """
        if self._thread in (0, threading.get_ident()):
            self.input += seconds
            self._input_cpu += cpu

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of the steps; see `part`."""
        return dict(self._parts)

    def part(self, name: str, seconds: float) -> None:
        """A part of a step has taken so long: "forward", "backward" or "optimizer"."""
        self._parts[name] += seconds

    def absent(self, count: int) -> None:
        """So many gradients are missing on this rank in this step."""
        self._absent += count

    def replicas_checked(self, *, are_equal: bool) -> None:
        """This rank has taken part in a check of replicas."""
        self._replica_checks += 1
        self._replica_mismatches += not are_equal
        self._write_counts()

    def ledger(self, window: float = WINDOW_SECONDS) -> Ledger:
        """Return what the thread that trains has used its time for in the last `window` seconds with steps.

        Where steps are so long that these are fewer than `LEAST_STEPS`, it is about so many steps, as far as they are known.
        """
        entries = list(self._ledgers)
        if len(entries) < 2:
            return NOTHING
        latest, total = entries[-1]
        first = next(index for index, (when, _) in enumerate(entries) if when >= latest - window)
        while first and total.steps - entries[first][1].steps < LEAST_STEPS:
            first -= 1
        return total.since(entries[first][1])

    def _collect(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._collection_begun = time.perf_counter()
        else:
            self._collecting += time.perf_counter() - self._collection_begun

    def _step(self, samples: int) -> None:
        now = time.monotonic()
        if self._is_due(now):
            self._enter(now)
        if self._last:
            _STEP.pack_into(self._memory, _TIMES + (self.steps - 1) % KEPT * _STEP.size, now - self._last, samples)
        self.steps += 1
        self._samples += samples
        self._last = now
        self._write()

    def _is_due(self, now: float) -> bool:
        """Return whether a step enters the time; in the first second those that double the steps do: jobs may be short."""
        if not self._ledgers or now - self._ledgers[-1][0] >= LEDGER_SECONDS:
            return True
        return not self.steps & (self.steps - 1) and now - self._ledgers[0][0] < LEDGER_SECONDS

    def _enter(self, now: float) -> None:
        """Enter the time up to now into the ledger; the calling thread is the one that trains."""
        self._thread = threading.get_ident()
        cpu, queued = self._schedule.read()
        self._begun = self._begun or now
        total = Ledger(now - self._begun, self.steps, self.blocked, cpu, queued, self._collecting, self.input,
                       self._input_cpu, self._absent, **self._parts,
                       traffic=() if self._traffic is None else self._traffic.read())
        if not self._ledgers:
            self._first = total
        self._ledgers.append((now, total))
        grown = total.since(self._first)
        _LEDGER.pack_into(self._memory, _HEAD.size + _BLOCKED.size, *grown.numbers)
        if self._traffic is not None:
            traffic = msgspec.json.encode(grown.traffic)
            _TRAFFIC.pack_into(self._memory, _TRAFFIC_AT, len(traffic), traffic)
        self._write_counts()

    def _write_counts(self) -> None:
        _COUNTS.pack_into(self._memory, _COUNTS_AT, peak_memory(), self._replica_checks, self._replica_mismatches)

    def _write(self) -> None:
        _HEAD.pack_into(self._memory, 0, self.steps, self._samples, self._counts_samples, self._last)


@dataclasses.dataclass(frozen=True)
class Reading:
    """A rank's progress at one moment.

    Attributes:
        samples: of this rank; steps, when nobody counts samples.
        blocked: seconds its script was blocked in waits, so far.
        idle: seconds since its last step; infinite before the first.
        rate: samples a second in undisturbed steps (see `rate_of`); 0.0 while there are too few.
        ledger: since its first step.
        peak: the most bytes of memory that it has used.
        replica_checks: how often replicas were compared; `replica_mismatches` of them have found a difference.
        metrics: of a rank that has ended (see `read_metrics`); else none.
    """

    steps: int = 0
    samples: int = 0
    counts_samples: bool = False
    blocked: float = 0.0
    idle: float = float("inf")
    rate: float = 0.0
    ledger: Ledger = NOTHING
    peak: int = 0
    replica_checks: int = 0
    replica_mismatches: int = 0
    metrics: list[Evaluation] = dataclasses.field(default_factory=list)


def read(job_directory: str, rank: int) -> Reading:
    """Return a rank's progress; that of a rank that has not called `init` is empty."""
    try:
        content = (Path(job_directory) / f"{PROGRESS_FILE}.{rank}").read_bytes()
        (steps, samples, counted, last, blocked, since, *numbers, peak, checks, unequal, length,
         text) = _ALL.unpack_from(content)
        ledger = msgspec.structs.replace(Ledger(*numbers), traffic=_traffic_in(text[:length]))
        kept = min(max(0, steps - 1), KEPT)
        times = [_STEP.unpack_from(content, _TIMES + index * _STEP.size) for index in range(kept)]
    except (OSError, struct.error):
        return Reading()
    if steps - 1 <= KEPT:
        times = times[WARM_UP:]
    now = time.monotonic()
    return Reading(steps, samples, bool(counted), blocked + (max(0.0, now - since) if since else 0.0),
                   now - last if last else float("inf"), rate_of(times), ledger, peak, checks, unequal)


def read_metrics(job_directory: str, rank: int) -> list[Evaluation]:
    """Return a rank's evaluations in the order in which it recorded them."""
    found = []
    with contextlib.suppress(OSError, ValueError, TypeError):  # the last line is cut off where the disk is full
        for line in (Path(job_directory) / f"{METRICS_FILE}.{rank}").read_text(encoding="utf-8").splitlines():
            found.append(Evaluation(*json.loads(line)))
    return found


def _number(what: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} is not a number: {value!r}") from None


def peak_memory() -> int:
    """Return the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_memory(pid: int | str) -> int:
    """Return the bytes of memory that a process ("self": this one) uses; 0 on systems other than Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _traffic_in(text: bytes) -> tuple[Traffic, ...]:
    with contextlib.suppress(msgspec.DecodeError):  # none yet, or they are being written
        return msgspec.json.decode(text, type=tuple[Traffic, ...])
    return ()


def rate_of(times: list[tuple[float, ...]]) -> float:
    """Return samples a second over steps of (seconds, samples), without those that took `PAUSE` times the median."""
    if not times:
        return 0.0
    limit = PAUSE * statistics.median(seconds for seconds, _ in times)
    counted = [(seconds, samples) for seconds, samples in times if seconds <= limit]
    duration = sum(seconds for seconds, _ in counted)
    return sum(samples for _, samples in counted) / duration if duration else 0.0
