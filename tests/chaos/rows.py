"""The report of chaos: a row for each kind of trouble, with what was tried and what came of it."""

from __future__ import annotations

import dataclasses
import random
import time
import traceback
from collections.abc import Callable, Iterable


@dataclasses.dataclass
class Row:
    """One kind of trouble.

    Attributes:
        what: the trouble.
        tried: hostile acts, faults, or jobs.
        survived: jobs or servers that did their work in spite of them.
        refused: hostile acts that were refused, or jobs that ended at once with a reason.
        wrong: what must not happen: a hang, a wrong result, an error without a reason, something left behind.
        remark: what the numbers do not say.
    """

    what: str
    tried: int = 0
    survived: int = 0
    refused: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    remark: str = ""


Round = Callable[[random.Random, Row], None]
"""Make some trouble, and count it; an exception is something wrong."""


@dataclasses.dataclass(frozen=True)
class Trouble:
    """A kind of trouble that can be made again and again.

    Attributes:
        share: of the time; the shares of all kinds need not add up to anything.
        goal: tries after which it is enough; its row says how far it came, and in what time. 0: there is none.
        unavailable: returns why it cannot be made here, "" when it can.
    """

    what: str
    make: Round
    share: float = 1.0
    unavailable: Callable[[], str] = lambda: ""
    goal: int = 0


REASONS = ("hvdrun: ", "Error: ", "Cannot allocate memory", "No space left")


def no_traceback_in(told: str) -> None:
    """Check that hvdrun has not ended, and none of its threads, in a traceback; a script may.

    Raises:
        AssertionError: when there is one.
    """
    for trace in told.split("Traceback (most recent call last)")[1:]:
        frames = [line for line in trace.splitlines() if line.lstrip().startswith("File ")]
        assert not any(each in line for line in frames for each in ("hvdlite_runner", "/runner/")), (
            f"hvdrun ended in a traceback: {told[-2000:]!r}")


def reason_in(told: str) -> str:
    """Return the line that says why a job has ended: hvdrun's if there is one, else the last one.

    Raises:
        AssertionError: when there is none, or hvdrun ended in a traceback, which never is a reason.
    """
    no_traceback_in(told)
    assert any(reason in told for reason in REASONS), f"no reason: {told[-2000:]!r}"
    lines = told.splitlines()
    return next((line for line in lines if line.startswith("hvdrun: ")), lines[-1])


def chance_of(seed: int, what: str, number: int) -> random.Random:
    """Return the random numbers of one round, whatever ran before it."""
    return random.Random(f"{seed} {what} {number}")


def rounds(trouble: Trouble, seed: int, seconds: float, numbers: Iterable[int]) -> Row:
    """Make trouble for some seconds, at least once; three rounds that go wrong are enough."""
    row = Row(trouble.what)
    if reason := trouble.unavailable():
        row.remark = f"left out: {reason}"
        return row
    began = time.monotonic()
    for number in numbers:
        try:
            trouble.make(chance_of(seed, trouble.what, number), row)
        except Exception:
            row.wrong.append(f"{trouble.what}, seed {seed}, round {number}:\n{traceback.format_exc()}")
        if time.monotonic() >= began + seconds or len(row.wrong) >= 3 or 0 < trouble.goal <= row.tried:
            break
    if trouble.goal:
        reached = f"{row.tried / trouble.goal:.0%} of the {trouble.goal:,} wanted"
        row.remark = f"{reached}, in {time.monotonic() - began:.0f} s of {seconds:.0f} s; {row.remark}"
    return row


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| trouble | tried | survived | refused | wrong | |", "|---|---:|---:|---:|---:|---|"]
    lines += [f"| {row.what} | {row.tried:,} | {row.survived:,} | {row.refused:,} | {len(row.wrong)} | {row.remark} |"
              for row in rows]
    return "\n".join(lines)
