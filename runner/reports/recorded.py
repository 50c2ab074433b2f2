"""`hvdrun --report FILE.jsonl`: what a record tells of its jobs, also of those that have crashed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from hvdlite.core.errors import LaunchError
from hvdlite.core.texts import printable
from hvdlite_runner.reports.scaling import show_table

ROWS: Final = 12
"""Of the table of throughput, at most."""
Line = dict[str, Any]


def show_record(path: str, *, as_json: bool = False) -> int:
    """Print what a record tells of each of its jobs; return 0.

    Raises:
        LaunchError: when it cannot be read, or has no job.
    """
    try:
        jobs = [summary(job) for job in jobs_in(Path(path).read_bytes().splitlines())]
    except OSError as error:
        raise LaunchError(f"cannot read the record {path}: {error.strerror}") from None
    if not jobs:
        raise LaunchError(f"{path} has no job: it is no file of hvdrun --record")
    if as_json:
        print(json.dumps(jobs, indent=1))
    for job in () if as_json else jobs:
        _show(job)
    return 0


def jobs_in(lines: Iterable[bytes]) -> list[list[Line]]:
    """Return the lines of each job of a record, without what is cut off."""
    jobs: list[list[Line]] = []
    for text in lines:
        try:
            line = json.loads(text)
            is_first = line["kind"] == "job"
        except (ValueError, TypeError, KeyError):
            continue
        if is_first:
            jobs.append([])
        if jobs:
            jobs[-1].append(line)
    return jobs


def summary(lines: list[Line]) -> dict[str, Any]:
    """Return what the lines of a job tell.

    Its events are worlds, lines of hvdrun, slow ranks and stalls, each with its second. Its exit code is None if that is not
    known: then hvdrun was killed, or still runs.
    """
    samples = [line for line in lines if line["kind"] == "sample"]
    ended = [line for line in lines if line["kind"] == "rank"]
    waited, peaks = dict[int, float](), dict[int, int]()
    for sample in samples:
        for rank, (share, memory) in enumerate(zip(sample["waits"], sample["memory"], strict=True)):
            if share is not None:
                waited[rank] = waited.get(rank, 0.0) + share * sample["over"]
                peaks[rank] = max(peaks.get(rank, 0), memory << 20)
    for line in ended:
        peaks[line["rank"]] = max(peaks.get(line["rank"], 0), line["memory"])
    seconds = sum(sample["over"] for sample in samples)
    count = min(ROWS, len(samples))
    rows = [_row(samples[index * len(samples) // count:(index + 1) * len(samples) // count]) for index in range(count)]
    return {
        "command": lines[0]["command"], "host": lines[0]["host"], "began": lines[0]["time"], "seconds": lines[-1]["seconds"],
        "exit_code": next((line["exit_code"] for line in lines if line["kind"] == "end"), None), "throughput": rows,
        "waits": {rank: round(each / seconds, 3) for rank, each in waited.items()}, "peak_memory": peaks,
        **{name: max((line[name] for line in samples + ended), default=0)
           for name in ("replica_checks", "replica_mismatches")},
        "events": [(line["seconds"], _event(line)) for line in lines
                   if line["kind"] in ("world", "note", "slowness", "stall")]}


def _row(samples: list[Line]) -> Line:
    seconds = sum(sample["over"] for sample in samples)
    return {"until": samples[-1]["seconds"], "unit": samples[-1]["unit"],
            "rate": sum(sample["rate"] * sample["over"] for sample in samples) / seconds,
            "memory": max(sum(filter(None, sample["memory"])) << 20 for sample in samples)}


def _event(line: Line) -> str:
    if line["kind"] == "world":
        return f"world {line['number']}: " + ", ".join(f"ranks {ranks} on {host}" for host, ranks in line["ranks"].items())
    return f"hvdrun: {line['text']}" if line["kind"] == "note" else str(line["text"])


def _show(job: Mapping[str, Any]) -> None:
    code, began = job["exit_code"], time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["began"]))
    end = f"it ended with exit code {code}" if code is not None else "its end is not recorded: hvdrun was killed, or runs on"
    print(printable(f"job on {job['host']}, {began}: {' '.join(job['command'])}"))
    print(f"recorded for {job['seconds']:,.1f} s; {end}")
    if job["throughput"]:
        show_table(["until", job["throughput"][-1]["unit"], "memory, MiB"], [
            [f"{row['until']:,.0f} s", f"{row['rate']:,.1f}", f"{row['memory'] / 2**20:,.0f}"] for row in job["throughput"]])
    for what, values in (("in waits", {rank: f"{share:.0%}" for rank, share in job["waits"].items()}),
                         ("most memory", {rank: f"{peak / 2**20:,.0f} MiB" for rank, peak in job["peak_memory"].items()})):
        if values:
            print(f"{what}: {', '.join(f'rank {rank} {text}' for rank, text in sorted(values.items()))}")
    if job["replica_checks"]:
        print(f"replica checks: {job['replica_checks']}, of which {job['replica_mismatches']} found a difference")
    for seconds, text in job["events"]:
        print(printable(f"{seconds:>9,.1f} s  {text}"))
