"""`hvdrun --report FILE.jsonl`: what a record tells of its jobs, also of those that have crashed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from hvdlite.core.errors import LaunchError
from hvdlite.core.texts import printable

ROWS: Final = 12
"""Of the throughput over time, at most."""
Line = dict[str, Any]
_CHECKS: Final = {"replica_checks": int, "replica_mismatches": int}
_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "job": {"host": str, "command": list[str]}, "world": {"number": int, "ranks": dict[str, str]},
    "sample": {"over": float, "unit": str, "rate": float, "waits": list[float | None], "memory": list[int | None]} | _CHECKS,
    "rank": {"rank": int, "memory": int, **_CHECKS}, "end": {"exit_code": int | None}}
"""What is read of a line, by kind."""


def show_record(path: str, *, as_json: bool = False) -> int:
    """Print what a record tells of each of its jobs, or the lines of each as JSON; return 0.

    Raises:
        LaunchError: when it cannot be read, or has no job.
    """
    try:
        jobs = jobs_in(Path(path).read_bytes().splitlines())
    except OSError as error:
        raise LaunchError(f"cannot read the record {path}: {error.strerror}") from None
    if not jobs:
        raise LaunchError(f"{path} has no job: it is no file of hvdrun --record")
    try:
        if as_json:
            print(json.dumps(jobs, indent=1))
        else:
            print(*(printable(line) for job in jobs for line in report(job)), sep="\n")
        sys.stdout.flush()
    except BrokenPipeError:  # head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def jobs_in(lines: Iterable[bytes]) -> list[list[Line]]:
    """Return the lines of each job of a record, without what is cut off or incomplete."""
    jobs: list[list[Line]] = []
    for text in lines:
        try:
            line = json.loads(text)
            for name, kind in {"seconds": float, "time": float, **_FIELDS.get(line["kind"], {})}.items():
                msgspec.convert(line[name], kind)
        except (ValueError, TypeError, KeyError):
            continue
        jobs += [[]] if line["kind"] == "job" else []
        for job in jobs[-1:]:
            job.append(line)
    return jobs


def report(lines: list[Line]) -> Iterator[str]:
    """Yield what the lines of a job tell: its end, the throughput over time, waits, memory, checks of replicas, events."""
    samples, ended = ([line for line in lines if line["kind"] == kind] for kind in ("sample", "rank"))
    end = "its end is not recorded: hvdrun was killed, or runs on"
    if lines[-1]["kind"] == "end":
        code = lines[-1]["exit_code"]
        end = "it could not begin" if code is None else f"it ended with exit code {code}"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lines[0]["time"]))
    yield f"job on {lines[0]['host']}, {began}: {' '.join(lines[0]['command'])}"
    yield f"recorded for {lines[-1]['seconds']:,.1f} s; {end}"
    count = min(ROWS, len(samples))
    for row in (samples[index * len(samples) // count:(index + 1) * len(samples) // count] for index in range(count)):
        rate = sum(sample["rate"] * sample["over"] for sample in row) / _seconds(row)
        yield f"{row[0]['seconds'] - row[0]['over']:>9,.0f} to {row[-1]['seconds']:,.0f} s: {rate:,.1f} {row[-1]['unit']}"
    waits, present, memory = dict[int, float](), dict[int, float](), dict[int, int]()
    for sample in samples:
        for rank, (part, mebibytes) in enumerate(zip(sample["waits"], sample["memory"], strict=False)):
            if part is not None:
                waits[rank] = waits.get(rank, 0.0) + part * sample["over"]
                present[rank] = present.get(rank, 0.0) + sample["over"]
                memory[rank] = max(memory.get(rank, 0), mebibytes or 0)
    for line in ended:
        memory[line["rank"]] = max(memory.get(line["rank"], 0), line["memory"] >> 20)
    if waits:
        shares = ((rank, waits[rank] / (present[rank] or 1.0)) for rank in sorted(waits))
        yield "in waits: " + ", ".join(f"rank {rank} {share:.0%}" for rank, share in shares)
    if memory:
        yield "most memory: " + ", ".join(f"rank {rank} {peak:,} MiB" for rank, peak in sorted(memory.items()))
    checks, unequal = (max((line[name] for line in samples + ended), default=0)
                       for name in ("replica_checks", "replica_mismatches"))
    if checks:
        yield f"replica checks: {checks}, of which {unequal} found a difference"
    for line in lines:
        if line["kind"] == "world":
            hosts = (f"ranks {ranks} on {host}" for host, ranks in line["ranks"].items())
            yield f"{line['seconds']:>9,.1f} s  world {line['number']}: {', '.join(hosts)}"
        elif "text" in line:
            yield f"{line['seconds']:>9,.1f} s  {'hvdrun: ' if line['kind'] == 'note' else ''}{line['text']}"


def _seconds(samples: Iterable[Line]) -> float:
    return sum(float(sample["over"]) for sample in samples) or 1.0
