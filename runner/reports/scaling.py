"""`hvdrun --scaling` and `--sweep`: runs with several numbers of ranks, or several values of an option, compared.

Throughput is counted by the ranks themselves (`hvd.record_step(samples)`, else optimizer steps) and summed over ranks. The
first few steps and pauses for evaluation or checkpoints do not count. Results are tables, on the terminal and as CSV, and
plots as PNG.

`hvdrun --profile`: where each rank's time went, from the ledgers of the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hvdlite.core.config import environment_name
from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import OUTPUT_LOST
from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.slowness import diagnose
from hvdlite_runner.host.commands import cores
from hvdlite_runner.job.loop import run_job
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.reports.comparison import Comparison, Jobs, Readings, Runs, show_table, write_csv, write_plot
from hvdlite_runner.reports.monitor import ThroughputRecorder

SATURATED: Final = 0.9
"""Throughput saturates at the smallest value that reaches this share of the best one."""


@dataclasses.dataclass(frozen=True)
class Throughput:
    """The throughput of a run: samples (or optimizer steps) per second over all ranks."""

    rate: float
    unit: str
    peak: int = 0  # bytes of memory of the rank that used most
    running: float = 0.0  # the share of time in which the threads that train were running, over all ranks
    waits: float = 0.0  # and in waits for collectives
    step: float = 0.0  # samples of a step of a rank, on average; 0 where they are not counted

    @classmethod
    def of(cls, readings: Readings) -> Throughput:
        """Add up the ranks' rates.

        Raises:
            LaunchError: when no rank has a rate.
        """
        rates = [reading.rate for reading in readings.values()]
        if not rates or not all(rates):
            steps = ", ".join(f"{reading.steps} on rank {rank}" for rank, reading in sorted(readings.items())) or "none"
            raise LaunchError(f"the script has made too few steps to compare ({steps}): it has to train for some seconds. "
                              "Optimizers of hvdlite count steps, those for TensorFlow and Keras on several ranks only; on "
                              "one rank, call hvd.record_step(len(batch)) after each step there")
        counted = all(reading.counts_samples for reading in readings.values())
        ledgers = [reading.ledger for reading in readings.values()]
        seconds = sum(ledger.seconds for ledger in ledgers) or 1.0
        return cls(sum(rates), "samples/s" if counted else "batches/s",
                   max(reading.peak for reading in readings.values()),
                   sum(ledger.cpu for ledger in ledgers) / seconds, sum(ledger.blocked for ledger in ledgers) / seconds,
                   sum(reading.samples for reading in readings.values())
                   / max(1, sum(reading.steps for reading in readings.values())) if counted else 0.0)


def with_equal_threads(jobs: Jobs) -> Jobs:
    """Return jobs whose ranks have as many threads as those of the largest one: else fewer ranks would be faster each."""
    most = max((count for _, settings in jobs for count in settings.slots.values()), default=1)
    return [(value, dataclasses.replace(settings, share_cores=most * settings.share_cores)) for value, settings in jobs]


def compare_sizes(compared: Comparison) -> int:
    """Run each job and print ranks, threads, throughput, speedup and scaling efficiency; write them as CSV and PNG.

    Efficiency is throughput(N) / (N x throughput(1)); without a run at 1, the smallest size is the reference.

    Returns:
        0, or the exit code of the first job that failed, which ends the comparison of those before it.

    Raises:
        LaunchError: when a job has too few steps, or the results cannot be written.
    """
    runs, code = compared.run(lambda size, readings: (int(size), Throughput.of(readings)), lambda row: row[1].rate)
    if not runs:
        return code
    rows = [each.median for each in runs]
    table, unit = scaling_rows(rows), rows[0][1].unit
    threads = compared.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // compared.jobs[0][1].share_cores))
    head = ["ranks", "threads", unit, "speedup", "efficiency", *compared.spread_head()]
    show_table(head, [[f"{size}", threads, f"{rate:,.1f}", f"{speedup:.2f}", f"{share:.1%}", *_shown(each)]
                      for (size, rate, speedup, share), each in zip(table, runs, strict=True)])
    write_csv(f"{compared.results}.csv", head, [(size, threads, *rest, *each.spread)
                                                for (size, *rest), each in zip(table, runs, strict=True)])
    sizes = [row[0] for row in table]
    _plot(f"{compared.results}.png", sizes, [row[1] for row in table], "ranks", unit,
          [rows[0][1].rate / rows[0][0] * size for size in sizes])
    return code


def _shown(runs: Runs[Any]) -> list[str]:
    return [f"{rate:,.1f}" for rate in runs.spread]


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


def sweep(compared: Comparison) -> int:
    """Run each job, and print its throughput and the value where it saturates; write and return like `compare_sizes`."""
    runs, code = compared.run(lambda value, readings: (value, Throughput.of(readings)), lambda row: row[1].rate)
    if not runs:
        return code
    rows = [each.median for each in runs]
    best = max(measured.rate for _, measured in rows)
    head = [compared.name, rows[0][1].unit, "of the best", "memory, MiB", "running", "in waits", *compared.spread_head()]
    show_table(head, [[value, f"{measured.rate:,.1f}", f"{measured.rate / best:.1%}", f"{measured.peak / 2**20:,.0f}",
                       f"{measured.running:.1%}", f"{measured.waits:.1%}", *_shown(each)]
                      for (value, measured), each in zip(rows, runs, strict=True)])
    for line in [summary(compared.name, rows), *notes(compared.name, rows)] if len(rows) > 1 else []:
        print(f"hvdrun: {line}")
    write_csv(f"{compared.results}.csv", head, [
        (value, measured.rate, measured.rate / best, measured.peak / 2**20, measured.running, measured.waits, *each.spread)
        for (value, measured), each in zip(rows, runs, strict=True)])
    _plot(f"{compared.results}.png", [value for value, _ in rows], [measured.rate for _, measured in rows], compared.name,
          head[1], None)
    return code


def notes(name: str, rows: Sequence[tuple[str, Throughput]]) -> Iterator[str]:
    """Yield what follows from the samples of a step: whether the option changed them, and how memory grows with them."""
    least, most = (choose((measured for _, measured in rows), key=lambda each: each.step) for choose in (min, max))
    if least.step == most.step > 0 and "batch" in name:
        yield f"a step had {most.step:g} samples at each {name}: does the script read --{name}?"
    if most.step > least.step > 0 and most.peak > least.peak:
        grown = (most.peak - least.peak) / (most.step - least.step) / 2**20
        yield (f"memory grows by {grown:.3g} MiB a sample: the peak of one process, between {least.step:g} and "
               f"{most.step:g} samples of a step")


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
