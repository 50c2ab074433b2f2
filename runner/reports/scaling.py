"""`hvdrun --scaling` and `--sweep`: runs with several numbers of ranks, or several values of an option, compared.

Throughput is counted by the ranks themselves (`hvd.record_step(samples)`, else optimizer steps) and summed over ranks. The
first few steps and pauses for evaluation or checkpoints do not count. Results are tables, on the terminal and as CSV, and
plots as PNG.

`hvdrun --profile`: where each rank's time went, from the ledgers of the ranks.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from hvdlite.core.config import environment_name
from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import OUTPUT_LOST
from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.progress import Reading
from hvdlite.diagnostics.slowness import diagnose
from hvdlite_runner.host.commands import cores
from hvdlite_runner.job.loop import run_job
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.options import USAGE_ERROR
from hvdlite_runner.reports.monitor import ThroughputRecorder

SATURATED: Final = 0.9
"""Throughput saturates at the smallest value that reaches this share of the best one."""

Jobs = Sequence[tuple[str, JobSettings]]
"""Each run's value and job."""
T = TypeVar("T")
Readings = Mapping[int, Reading]
"""Of each rank: its last reading."""


@dataclasses.dataclass(frozen=True)
class Throughput:
    """The throughput of a run: samples (or optimizer steps) per second over all ranks."""

    rate: float
    unit: str
    peak: int = 0  # bytes of memory of the rank that used most
    running: float = 0.0  # the share of time in which the threads that train were running, over all ranks
    waits: float = 0.0  # and in waits for collectives

    @classmethod
    def of(cls, readings: Readings) -> Throughput:
        """Add up the ranks' rates.

        Raises:
            LaunchError: when no rank has a rate.
        """
        rates = [reading.rate for reading in readings.values()]
        if not rates or not all(rates):
            raise LaunchError("the script has made too few steps to compare: call hvd.record_step(len(batch)) "
                              "after each step, or use an optimizer of hvdlite, for more than a few steps")
        counted = all(reading.counts_samples for reading in readings.values())
        ledgers = [reading.ledger for reading in readings.values()]
        seconds = sum(ledger.seconds for ledger in ledgers) or 1.0
        return cls(sum(rates), "samples/s" if counted else "batches/s",
                   max(reading.peak for reading in readings.values()),
                   sum(ledger.cpu for ledger in ledgers) / seconds, sum(ledger.blocked for ledger in ledgers) / seconds)


def with_equal_threads(jobs: Jobs) -> Jobs:
    """Return jobs whose ranks have as many threads as those of the largest one: else fewer ranks would be faster each."""
    most = max((count for _, settings in jobs for count in settings.slots.values()), default=1)
    return [(value, dataclasses.replace(settings, share_cores=most * settings.share_cores)) for value, settings in jobs]


def compare_sizes(jobs: Jobs, environ: Mapping[str, str], results: str) -> int:
    """Run each job and print ranks, threads, throughput, speedup and scaling efficiency; write `results`.csv and .png.

    Efficiency is throughput(N) / (N x throughput(1)); without a run at 1, the smallest size is the reference.

    Returns:
        0, or the exit code of the first job that failed, which ends the comparison of those before it.

    Raises:
        LaunchError: when a job has too few steps, or the results cannot be written.
    """
    rows, code = run_each(sorted(jobs, key=lambda job: int(job[0])), lambda size: f"{size} rank{'s' if size != '1' else ''}",
                          environ, lambda size, readings: (int(size), Throughput.of(readings)))
    if not rows:
        return code
    table = scaling_rows(rows)
    threads = environ.get("OMP_NUM_THREADS") or str(max(1, cores() // jobs[0][1].share_cores))
    head = ["ranks", "threads", rows[0][1].unit, "speedup", "efficiency"]
    show_table(head, [[f"{size}", threads, f"{rate:,.1f}", f"{speedup:.2f}", f"{share:.1%}"]
                      for size, rate, speedup, share in table])
    write_csv(f"{results}.csv", head, [(size, threads, *rest) for size, *rest in table])
    sizes = [row[0] for row in table]
    _plot(f"{results}.png", sizes, [row[1] for row in table], "ranks", head[2],
          [rows[0][1].rate / rows[0][0] * size for size in sizes])
    return code


def scaling_rows(rows: Sequence[tuple[int, Throughput]]) -> list[tuple[int, float, float, float]]:
    """Return (ranks, throughput, speedup, efficiency) for each size; see `compare_sizes`."""
    size, first = rows[0]
    one = first.rate / size
    return [(ranks, measured.rate, measured.rate / one, measured.rate / (ranks * one)) for ranks, measured in rows]


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Return the option and the values of `batch-size=32,64,128`.

    Raises:
        LaunchError: when the text has another form.
    """
    name, equals, values = text.partition("=")
    chosen = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not chosen or not name.strip("-"):
        raise LaunchError(f"--sweep {text!r} is not OPTION=VALUE,VALUE,...; for example: --sweep batch-size=32,64,128")
    return name.lstrip("-"), chosen


def sweep(name: str, jobs: Jobs, environ: Mapping[str, str], results: str) -> int:
    """Run each job, and print its throughput and the value where it saturates; write and return like `compare_sizes`."""
    rows, code = run_each(jobs, lambda value: f"--{name} {value}", environ,
                          lambda value, readings: (value, Throughput.of(readings)))
    if not rows:
        return code
    best = max(measured.rate for _, measured in rows)
    head = [name, rows[0][1].unit, "of the best", "memory, MiB", "running", "in waits"]
    show_table(head, [[value, f"{measured.rate:,.1f}", f"{measured.rate / best:.1%}", f"{measured.peak / 2**20:,.0f}",
                       f"{measured.running:.1%}", f"{measured.waits:.1%}"] for value, measured in rows])
    if len(rows) > 1:
        print(f"hvdrun: {summary(name, rows)}")
    write_csv(f"{results}.csv", head, [
        (value, measured.rate, measured.rate / best, measured.peak / 2**20, measured.running, measured.waits)
        for value, measured in rows])
    _plot(f"{results}.png", [value for value, _ in rows], [measured.rate for _, measured in rows], name, head[1], None)
    return code


def saturation(rows: Sequence[tuple[str, Throughput]]) -> str:
    """Return the first value that reaches `SATURATED` of the best throughput."""
    best = max(measured.rate for _, measured in rows)
    return next(value for value, measured in rows if measured.rate >= SATURATED * best)


def summary(name: str, rows: Sequence[tuple[str, Throughput]]) -> str:
    """Return where the throughput of several values of an option saturates, and what the best value gains from there."""
    where = saturation(rows)
    if where == rows[-1][0]:
        return f"throughput still grows at {name} {where}, the last value"
    best, rate = max((measured.rate, value) for value, measured in rows), dict(rows)[where].rate
    if best[1] == where:
        return f"throughput saturates at {name} {where}: no other value is faster"
    return f"throughput saturates at {name} {where}: {best[1]}, the fastest value, gains {best[0] / rate - 1:.1%}"


def run_each(jobs: Jobs, describe: Callable[[str], str], environ: Mapping[str, str],
             read: Callable[[str, Readings], T]) -> tuple[list[T], int]:
    """Run one job after the other, as long as none fails.

    Args:
        read: makes a result of a job's value and its ranks' last readings; a `LaunchError` of it is a failure.

    Returns:
        The results of the jobs that succeeded; and 0, or the exit code of the one that failed.

    Raises:
        LaunchError: when `read` fails for the first job.
    """
    results: list[T] = []
    for value, settings in jobs:
        print(f"hvdrun: {describe(value)}", file=sys.stderr, flush=True)
        recorder = ThroughputRecorder()
        code = run_job(settings, environ, recorder)
        if code not in (0, OUTPUT_LOST):
            return results, code
        try:
            results.append(read(value, recorder.ranks))
        except LaunchError as error:
            if not results:
                raise
            print(f"hvdrun: {describe(value)}: {error}", file=sys.stderr)
            return results, USAGE_ERROR
    return results, 0


def _plot(path: str, xs: Sequence[object], rates: Sequence[float], label: str, unit: str,
          ideal: Sequence[float] | None) -> None:
    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        where: list[Any] = list(range(len(xs)) if ideal is None else xs)  # a straight line should look like one
        axes.plot(where, rates, "o-", label="measured")
        if ideal is not None:
            axes.plot(where, ideal, ":", color="grey", label="linear")
            axes.legend()
        axes.set_xticks(where, [str(x) for x in xs])
        axes.set(xlabel=label, ylabel=unit, ylim=(0, None))
    write_plot(path, (6, 4), draw)


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


PARTS: Final = ("input", "forward", "backward", "waits", "optimizer", "other")
_COLORS: Final = ("tab:red", "tab:blue", "tab:cyan", "tab:orange", "tab:green", "tab:gray")


def profile(settings: JobSettings, environ: Mapping[str, str], results: str) -> int:
    """Run a job, and print for each rank the shares of time; write `results`.csv and .png.

    Returns:
        0, or the exit code of a job that failed.

    Raises:
        LaunchError: when no rank has made enough steps.
    """
    recorder = ThroughputRecorder()
    counting = {**settings.environment, environment_name("step_parts"): "1"}
    code = run_job(dataclasses.replace(settings, environment=counting), environ, recorder)
    if code not in (0, OUTPUT_LOST):
        return code
    ledgers = {rank: reading.ledger for rank, reading in sorted(recorder.ranks.items())}
    table = rows(ledgers)
    if not table:
        raise LaunchError("the script has made too few steps for a profile: use an optimizer of hvdlite, or call "
                          "hvd.record_step(len(batch)), for some seconds")
    head = ["rank", "steps", "ms/step", *PARTS, "running"]
    show_table(head, [[f"{rank}", f"{steps}", f"{each:.1f}", *(f"{share:.1%}" for share in shares)]
                      for rank, steps, each, *shares in table])
    slowness = diagnose(ledgers)
    if slowness is not None:
        print(f"hvdrun: {slowness}")
    write_csv(f"{results}.csv", head, table)
    write_plot(f"{results}.png", (7, 1.2 + 0.4 * len(table)), lambda figure: _draw(figure, table))
    return 0


def rows(ledgers: Mapping[int, Ledger]) -> list[list[Any]]:
    """Return, of each rank that has made steps: rank, steps, milliseconds of a step, the shares of `PARTS`, of running."""
    found: list[list[Any]] = []
    for rank, ledger in ledgers.items():
        if ledger.steps and ledger.seconds > 0:
            known = [ledger.input, ledger.forward, ledger.backward, ledger.blocked, ledger.optimizer]
            parts = [*known, max(0.0, ledger.seconds - sum(known))]
            found.append([rank, ledger.steps, 1000 * ledger.seconds / ledger.steps,
                          *(part / ledger.seconds for part in (*parts, ledger.cpu))])
    return found


def _draw(figure: Any, table: list[list[Any]]) -> None:
    axes = figure.add_subplot()
    ranks, begins = [f"rank {row[0]}" for row in table], [0.0] * len(table)
    for index, (part, color) in enumerate(zip(PARTS, _COLORS, strict=True)):
        widths = [row[2] * row[3 + index] for row in table]
        axes.barh(ranks, widths, left=begins, label=part, color=color)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of a step")
    axes.legend(ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small", frameon=False)
