"""`hvdrun --monitor`: a table of the ranks, updated every second. `--scaling` uses its measurements."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from hvdlite.core.ledger import Ledger
from hvdlite.core.texts import printable
from hvdlite.diagnostics.progress import Reading
from hvdlite.diagnostics.slowness import LEAST_STEPS, Slowness, diagnose
from hvdlite_runner.host.processes import STALL_SECONDS
from hvdlite_runner.messages import ProgressReply, Sample
from hvdlite_runner.output.job_output import ProgressObserver
from hvdlite_runner.placement import LOCAL

WINDOW: Final = 20.0
"""Seconds over which ranks are compared, to see why they are slow; more where these have fewer than `LEAST_STEPS` steps."""
_KEPT: Final = 200  # updates with new ledgers, at most


def table(before: Mapping[int, Sample], now: Mapping[int, Sample], rank_hosts: Mapping[int, str], seconds: float,
          waits: str) -> list[str]:
    """Return the table's lines from two samples of the ranks' progress, `seconds` apart."""
    several, gpus = len({rank_hosts.get(rank, "") for rank in now}) > 1, any(each.gpu for each in now.values())
    width, total = 16 if several else 0, 0.0
    lines = [f"{'rank':>4}{'  host' if several else '':<{width}} {'steps/s':>9} {'samples/s':>10} "
             f"{'in waits':>9} {'last step':>10} {'memory':>9}" + ("  GPU" if gpus else "")]
    for rank, each in sorted(now.items()):
        new, old = each.reading, before.get(rank, each).reading
        steps = max(0, new.steps - old.steps) / seconds
        samples = max(0, new.samples - old.samples) / seconds if new.counts_samples else 0.0
        blocked = min(1.0, (new.blocked - old.blocked) / seconds)
        idle = "none yet" if new.idle == math.inf else f"{new.idle:.1f} s ago" if new.idle > STALL_SECONDS else "now"
        host = f"  {rank_hosts.get(rank, '')}" if several else ""
        lines.append(f"{rank:>4}{host:<{width}} {steps:>9.1f} {samples:>10,.0f} {blocked:>9.0%} {idle:>10} "
                     f"{each.memory / 2**20:>5.0f} MiB" + (f"  {each.gpu}" if gpus else ""))
        total += samples
    if total:
        lines.append(f"all ranks: {total:,.0f} samples/s{_shares(before, now)}")
    return lines + waits.splitlines()


def _shares(before: Mapping[int, Sample], now: Mapping[int, Sample]) -> str:
    """Return the ranks' rows of a step if some have a row more than others: shards of equal shares differ by one at most."""
    rows = {rank: (each.reading.samples - before[rank].reading.samples) / steps for rank, each in sorted(now.items())
            if rank in before and (steps := each.reading.steps - before[rank].reading.steps) > 0}
    if not rows or max(rows.values()) - min(rows.values()) <= 1:
        return ""
    return "; rows of a step by rank: " + ", ".join(f"{rank}: {each:.0f}" for rank, each in rows.items())


class RankFigures(ProgressObserver):
    """What is known of the ranks of the present world; a subclass shows it each second."""

    wants_samples = True

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        RankFigures.begin_world(self, {})

    def begin_world(self, rank_hosts: Mapping[int, str]) -> None:
        """Begin anew: ranks may be others' now."""
        self._rank_hosts, self._waits = rank_hosts, ""
        self._ledgers: deque[tuple[float, dict[int, Ledger]]] = deque(maxlen=_KEPT)  # of some moments of the last seconds
        self._now, self._before, self._when = dict[int, Sample](), dict[int, Sample](), self._clock()

    def take(self, host: str, event: ProgressReply) -> None:
        """Add the progress of a host's ranks; the launcher's own host is the last one of each round."""
        self._now |= event.ranks
        self._waits = event.waits or self._waits
        if host == LOCAL and self._now:
            now = self._clock()
            self._show(now, self._slowness(now))

    def ended(self, rank: int, reading: Reading) -> None:
        """Forget a rank that has ended."""
        self._now.pop(rank, None)

    def _show(self, now: float, slowness: Slowness | None) -> None:
        raise NotImplementedError

    def _slowness(self, now: float) -> Slowness | None:
        """Take the present ledgers; return why the job has been slow lately."""
        last = {rank: each.reading.ledger for rank, each in self._now.items()}
        if not self._ledgers or last != self._ledgers[-1][1]:  # long steps change none for a while
            self._ledgers.append((now, last))
        while len(self._ledgers) > 1 and self._ledgers[1][0] <= now - WINDOW and _are_enough(self._ledgers[1][1], last):
            self._ledgers.popleft()
        return diagnose(_grown(self._ledgers[0][1], last))


class Monitor(RankFigures):
    """Shows the table: in place on a terminal, below the ranks' output; elsewhere one table after the other.

    Args:
        write: writes text to the terminal, before `attach`.
        in_place: whether the table may be overwritten.
    """

    def __init__(self, write: Callable[[str], None], in_place: bool,
                 clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._write = write
        self._in_place = in_place
        self._drawn = 0
        self._is_busy: Callable[[], bool] = lambda: False

    def attach(self, write: Callable[[str], None], is_busy: Callable[[], bool]) -> None:
        """Write with the job's output from now on; while the terminal takes nothing, leave tables out."""
        self._write, self._is_busy = write, is_busy

    def _show(self, now: float, slowness: Slowness | None) -> None:
        if now - self._when >= 0.9 and not self._is_busy():
            self.clear_table()
            lines = table(self._before, self._now, self._rank_hosts, now - self._when, self._waits)
            if slowness is not None and not self._waits:
                lines.append(str(slowness))
            self._write("".join(f"{printable(line)}\n" for line in lines))
            self._drawn = len(lines)
            self._before, self._when, self._waits = dict(self._now), now, ""

    def clear_table(self) -> None:
        """Remove the table from the terminal; the next update writes it again, below other output."""
        if self._in_place and self._drawn:
            self._write(f"\x1b[{self._drawn}F\x1b[J")
        self._drawn = 0

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
        self.ranks: dict[int, Reading] = {}

    def ended(self, rank: int, reading: Reading) -> None:
        """Record a rank's last reading."""
        self.ranks[rank] = reading
