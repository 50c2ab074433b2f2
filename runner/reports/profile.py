"""`hvdrun --profile`: where each rank's time went, from the ledgers of the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from hvdlite.core.config import environment_name
from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import OUTPUT_LOST
from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.slowness import diagnose
from hvdlite_runner.job.loop import run_job
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.reports.monitor import ThroughputRecorder
from hvdlite_runner.reports.scaling import show_table, write_csv, write_plot

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
