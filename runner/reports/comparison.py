"""The runs that `hvdrun --scaling` and `--sweep` compare, one after the other, and the tables and plots of results."""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import OUTPUT_LOST
from hvdlite.diagnostics.progress import Reading
from hvdlite_runner.job.loop import run_job
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.options import USAGE_ERROR
from hvdlite_runner.reports.monitor import ThroughputRecorder

Jobs = Sequence[tuple[str, JobSettings]]
"""Each run's value and job."""
T = TypeVar("T")
Readings = Mapping[int, Reading]
"""Of each rank: its last reading."""


@dataclasses.dataclass(frozen=True)
class Runs(Generic[T]):
    """What was measured of one value.

    Attributes:
        median: the run with the median of a figure; of an even number, the one with the lower of the two in the middle.
        spread: the least and the greatest figure; none if there was one run.
    """

    median: T
    spread: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs to compare.

    Attributes:
        name: of the option that differs; "" where it is the number of ranks.
        jobs: their values and jobs.
        environ: the launcher's environment.
        results: the name of the files, without endings.
        repeat: how often each job is run.
    """

    name: str
    jobs: Jobs
    environ: Mapping[str, str]
    results: str
    repeat: int = 1

    def describe(self, value: str) -> str:
        """Return how a run is called."""
        return f"--{self.name} {value}" if self.name else f"{value} rank{'s' if value != '1' else ''}"

    def spread_head(self, unit: str = "") -> list[str]:
        """Return the heads of the columns with spreads."""
        return [f"least{unit} of {self.repeat}", f"greatest{unit}"] if self.repeat > 1 else []

    def run(self, read: Callable[[str, Readings], T], figure: Callable[[T], float]) -> tuple[list[Runs[T]], int]:
        """Run one job after the other, as long as none fails.

        Args:
            read: makes a result of a job's value and its ranks' last readings; a `LaunchError` of it is a failure.
            figure: by which the runs of a job are ordered.

        Returns:
            The results of the jobs that succeeded; and 0, or the exit code of the one that failed.

        Raises:
            LaunchError: when `read` fails for the first job.
        """
        results: list[Runs[T]] = []
        for line in self._unread():
            print(f"hvdrun: {line}", file=sys.stderr)
        for index, (value, settings) in enumerate(self.jobs):
            runs: list[T] = []
            for number in range(self.repeat):
                which = f" ({number + 1} of {self.repeat})" if self.repeat > 1 else ""
                print(f"hvdrun: {self.describe(value)}{which}", file=sys.stderr, flush=True)
                recorder = ThroughputRecorder()
                code = run_job(settings, self.environ, recorder)
                if code not in (0, OUTPUT_LOST):
                    if index:
                        print(f"hvdrun: {self.describe(value)} failed (exit code {code}); the largest value that ran: "
                              f"{_largest([each for each, _ in self.jobs[:index]])}", file=sys.stderr)
                    return results, code
                try:
                    runs.append(read(value, recorder.ranks))
                except LaunchError as error:
                    if not results:
                        raise
                    print(f"hvdrun: {self.describe(value)}: {error}", file=sys.stderr)
                    return results, USAGE_ERROR
            runs.sort(key=figure)
            spread = (figure(runs[0]), figure(runs[-1])) if self.repeat > 1 else ()
            results.append(Runs(runs[(len(runs) - 1) // 2], spread))
        return results, 0

    def _unread(self) -> Iterator[str]:
        """Yield a line if the script does not seem to read the option."""
        for script in [Path(word) for word in self.jobs[0][1].command if word.endswith(".py")][:1] if self.name else []:
            text = script.read_text("utf-8", "replace") if script.is_file() else self.name
            if self.name.replace("-", "_") not in text.replace("-", "_"):
                yield f"{script} does not contain {self.name!r}: does it read --{self.name}? If not, all runs are alike"


def _largest(values: Sequence[str]) -> str:
    try:
        return max(values, key=float)
    except ValueError:  # no numbers
        return values[-1]


def show_table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    for row in (head, *cells):
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def write_csv(path: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a table to a file.

    Raises:
        LaunchError: when that is not possible.
    """
    def write() -> None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([head, *rows])
    _write(path, write)


def write_plot(path: str, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write a plot to a file, if matplotlib is installed; else print how to install it.

    Args:
        size: width and height in inches.
        draw: draws in a `matplotlib.figure.Figure`.

    Raises:
        LaunchError: when the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # only here: no display, no global state
    except ImportError:
        print(f"hvdrun: no plot {path}: pip install matplotlib", file=sys.stderr)
        return
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    _write(path, lambda: figure.savefig(path, dpi=120))


def _write(path: str, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from None
    print(f"hvdrun: wrote {path}", file=sys.stderr)
