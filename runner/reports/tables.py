"""Results: tables on the terminal and as CSV, and plots as PNG."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.core.errors import LaunchError


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
