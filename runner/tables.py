"""Tables of results, on the terminal and as CSV."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence

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
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([head, *rows])
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}") from None
    print(f"hvdrun: wrote {path}", file=sys.stderr)
