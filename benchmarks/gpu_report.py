"""The record of `gpu_check`: its file, its table, and the targets that it answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
SAME = ("gpu", "gpus", "commit", "python", "versions")
"""What must be equal in records that are put together."""
COLLECTIVE_TESTS = tuple(f"{test}[{size}]" for test in ("test_every_reduction_and_dtype", "test_every_other_collective")
                         for size in (2, 4))


def read(path: Path) -> Record | None:
    try:
        found: Record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def write(path: Path, record: Record) -> None:
    """Replace a record's file by a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(new, path)


def merged(records: Sequence[Record]) -> Record:
    """Return the first record with the checks that the others have of the same machine, versions and commit."""
    first = records[0]
    alike = [each for each in records if all(each.get(key) == first.get(key) for key in SAME)]
    checks: dict[str, Record] = {}
    for each in reversed(alike):
        checks |= each.get("checks", {})
    return {**first, "checks": checks}


def summary(name: str, result: Record) -> str:
    """Return how a check ended, for people."""
    lines = [f"    {result['state']}, {result['seconds']} s"]
    if "tests" in result:
        lines.append(f"    {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
        lines += [f"    {test}: {text.splitlines()[0][:160]}" for test, text in result["tests"].items()
                  if text != "passed" and not text.startswith("skipped")]
    lines += [f"    {part}: {text.strip().splitlines()[-1][:200]}" for part, text in result.get("errors", {}).items()]
    return "\n".join(lines)


def table(record: Record) -> str:
    """Return all figures, one a line, for people."""
    lines = ["", f"{'check':<16} {'figure':<62} {'value':>12} unit"]
    for name, result in record["checks"].items():
        lines.append(f"{name:<16} {'(' + result['state'] + ')':<62} {result.get('seconds', ''):>12} s")
        for figure in result.get("figures", ()):
            value = figure["value"]
            shown = f"{value:,.3f}" if isinstance(value, float) else str(value)
            lines.append(f"{'':<16} {figure['name']:<62} {shown:>12} {figure['unit']}")
    lines += [f"{'target':<16} {name:<62} {figure:>12} {verdict}" for name, verdict, figure in targets(record)]
    return "\n".join(lines)


def targets(record: Record) -> list[tuple[str, str, str]]:
    """Return what was to be shown, whether it was, and the figure."""
    checks = record["checks"]
    figures = {(name, figure["name"]): figure["value"] for name, result in checks.items()
               for figure in result.get("figures", ())}
    rules: tuple[tuple[str, tuple[str, str], Callable[[float], bool]], ...] = (
        ("size-1 overhead at most 1 % (ResNet-50, batch 64)", ("training", "resnet50 float32: wrapped / plain"),
         lambda value: value <= 1.01),
        ("less host time a step than DDP", ("several ranks", "many layers, host: wrapped / the faster DDP"),
         lambda value: value < 1.0),
        ("pack and unpack at 70 % of a copy's bandwidth", ("pack", "pack and unpack / copy"), lambda value: value >= 0.7),
        ("no host synchronisation in a training step", ("waits", "calls that wait, per step"), lambda value: value == 0),
        ("bucket full to NCCL enqueued at most 40 us, p50", ("several ranks", "launches, idle: p50"),
         lambda value: value <= 40),
        ("bucket full to NCCL enqueued at most 200 us, p99", ("several ranks", "launches, idle: p99"),
         lambda value: value <= 200),
    )
    tests = checks.get("rank tests", {}).get("tests", {})
    ran = [tests[name] for name in COLLECTIVE_TESTS if name in tests and not tests[name].startswith("skipped")]
    verdict = "not measured" if len(ran) < len(COLLECTIVE_TESTS) else "met"
    if any(text != "passed" for text in ran):
        verdict = "NOT MET"
    found = [("every collective and dtype right on 2 and 4 ranks", verdict, f"{ran.count('passed')} tests")]
    for name, key, rule in rules:
        value = figures.get(key)
        found.append((name, "not measured" if value is None else "met" if rule(value) else "NOT MET",
                      "" if value is None else f"{value:.3f}"))
    return found
