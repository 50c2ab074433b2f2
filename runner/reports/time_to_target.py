"""`hvdrun --sweep ... --until`, `--scaling ... --until`: epochs and seconds after which each run reaches a metric's value.

Scripts record the metric themselves, after each evaluation (`hvd.record_metrics`). Every run goes on to its end, because its
last metrics are compared too.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdlite.core.errors import LaunchError
from hvdlite.diagnostics.progress import Evaluation
from hvdlite_runner.reports.comparison import Comparison, Readings, show_table, write_csv, write_plot


@dataclasses.dataclass(frozen=True)
class MetricTarget:
    """A value that a metric is to reach."""

    metric: str
    value: float
    is_lower_bound: bool = True

    @classmethod
    def parse(cls, text: str) -> MetricTarget:
        """Return the target of `accuracy=0.88` (also `accuracy>=0.88`) or `loss<=0.3`.

        Raises:
            LaunchError: when the text has another form.
        """
        found = re.fullmatch(r"\s*(.+?)\s*(>=|<=|=)\s*(\S+)\s*", text)
        try:
            value = float(found[3]) if found else math.nan
        except ValueError:
            value = math.nan
        if found is None or not math.isfinite(value):
            raise LaunchError(f"--until {text!r} is not METRIC=VALUE or 'METRIC<=VALUE'; for example: --until accuracy=0.88")
        return cls(found[1], value, found[2] != "<=")

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.is_lower_bound else '<='} {self.value:g}"

    def is_reached(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation's metrics reach it; NaN does not."""
        value = metrics.get(self.metric, math.nan)
        return value >= self.value if self.is_lower_bound else value <= self.value


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """What one run has recorded."""

    value: str  # of the option
    evaluations: Sequence[Evaluation]  # at least one with the target's metric

    @classmethod
    def of(cls, value: str, readings: Readings, target: MetricTarget) -> RunMetrics:
        """Return a run by its ranks' last readings.

        Raises:
            LaunchError: when rank 0 has not recorded the target's metric.
        """
        found = readings[0].metrics if 0 in readings else []
        names = {name for each in found for name in each.metrics}
        if target.metric not in names:
            recorded = f"only {', '.join(sorted(names))}" if names else "nothing"
            raise LaunchError(f"rank 0 has recorded no metric {target.metric!r}, {recorded}: call "
                              f"hvd.record_metrics({{{target.metric!r}: ...}}, epoch) after each evaluation")
        return cls(value, found)

    def reached(self, target: MetricTarget) -> Evaluation | None:
        """Return the first evaluation that reached a target, if there is one."""
        return next((each for each in self.evaluations if target.is_reached(each.metrics)), None)

    def seconds(self, target: MetricTarget) -> float:
        """Return the seconds to a target; infinite if it was not reached."""
        found = self.reached(target)
        return math.inf if found is None else found.seconds

    def last(self, metric: str) -> float | None:
        """Return the last value of a metric, if it was recorded."""
        return next((each.metrics[metric] for each in reversed(self.evaluations) if metric in each.metrics), None)


def compare_times(compared: Comparison, target: MetricTarget) -> int:
    """Run each job; print the epochs and seconds to the target and the last metrics; write them as CSV and PNG.

    Seconds are counted from `hvd.init()` and include evaluations.

    Returns:
        0, or the exit code of the first job that failed, which ends the comparison of those before it.

    Raises:
        LaunchError: when a script does not record the metric, or the results cannot be written.
    """
    repeated, code = compared.run(lambda value, readings: RunMetrics.of(value, readings, target),
                                  lambda run: run.seconds(target))
    if not repeated:
        return code
    name, runs = compared.name or "ranks", [each.median for each in repeated]
    head, table = rows(name, target, runs)
    head += compared.spread_head(" seconds")
    spreads = [[None if math.isinf(each) else each for each in one.spread] for one in repeated]
    show_table(head, [[value, "not reached" if epochs is None else f"{epochs:g}",
                       *("-" if cell is None else f"{cell:.4g}" for cell in [*cells, *spread])]
                      for (value, epochs, *cells), spread in zip(table, spreads, strict=True)])
    for line in [summary(name, target, runs), *notes(compared, runs)]:
        print(f"hvdrun: {line}")
    write_csv(f"{compared.results}.csv", head, [["" if cell is None else cell for cell in [*row, *spread]]
                                                for row, spread in zip(table, spreads, strict=True)])
    write_plot(f"{compared.results}.png", (9, 4), lambda figure: _draw(figure, name, target, runs))
    return code


def notes(compared: Comparison, runs: Sequence[RunMetrics]) -> Iterator[str]:
    """Yield what makes the comparison doubtful: runs that are alike, and one learning rate for all batch sizes."""
    recorded = [[each.metrics for each in run.evaluations] for run in runs]
    if compared.name and len(runs) > 1 and all(each == recorded[0] for each in recorded):
        yield f"all runs recorded the same metrics: does the script read --{compared.name}?"
    if "batch" in compared.name and not any(word.startswith("--base-batch-size") for word in compared.jobs[0][1].command):
        yield (f"the learning rate is the same at each {compared.name} unless the script scales it, as the examples do with "
               "--base-batch-size")


def rows(name: str, target: MetricTarget, runs: Sequence[RunMetrics]) -> tuple[list[str], list[list[Any]]]:
    """Return the table's head and rows: the option's value, epochs and seconds to the target, and each metric's last value.

    None stands for a target that was not reached, and for a metric that a run did not record.
    """
    recorded = (metric for run in runs for each in run.evaluations for metric in each.metrics)
    metrics = list(dict.fromkeys([target.metric, *recorded]))
    table: list[list[Any]] = []
    for run in runs:
        found = run.reached(target)
        table.append([run.value, found and found.epoch, found and found.seconds, *map(run.last, metrics)])
    return [name, f"epochs to {target}", "seconds", *(f"last {metric}" for metric in metrics)], table


def summary(name: str, target: MetricTarget, runs: Sequence[RunMetrics]) -> str:
    """Return which value of the option was the soonest to reach the target, and which ones did not."""
    found = [(reached.seconds, reached.epoch, run.value) for run in runs if (reached := run.reached(target)) is not None]
    missed = [run.value for run in runs if run.reached(target) is None]
    if not found:
        return f"no run reached {target}: give them more epochs, or another target"
    seconds, epoch, value = min(found)
    text = f"{target} soonest at {name} {value}: {seconds:.4g} s, {epoch:g} epochs"
    return f"{text}; not reached at {', '.join(missed)}" if missed else text


def _draw(figure: Any, name: str, target: MetricTarget, runs: Sequence[RunMetrics]) -> None:
    """Draw the metric over time, a line for each run, and beside it the seconds to the target by value."""
    curves, bars = figure.subplots(1, 2)
    for run in runs:
        known = [each for each in run.evaluations if target.metric in each.metrics]
        curves.plot([each.seconds for each in known], [each.metrics[target.metric] for each in known], ".-", label=run.value)
    curves.axhline(target.value, color="grey", linestyle=":")
    curves.set(xlabel="seconds", ylabel=target.metric)
    curves.legend(title=name)
    for index, run in enumerate(runs):
        found = run.reached(target)
        drawn = bars.bar(index, found.seconds if found else 0.0, color=f"C{index % 10}")
        bars.bar_label(drawn, [f"{found.epoch:g} epochs" if found else "not reached"])
    bars.set_xticks(range(len(runs)), [run.value for run in runs])
    bars.set(xlabel=name, ylabel=f"seconds to {target}")
    bars.margins(y=0.15)
