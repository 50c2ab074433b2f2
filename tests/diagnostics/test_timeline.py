"""The timeline: valid JSON at any time, spans of every rank that nest, started and stopped while the job runs."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import ConfigError
from hvdlite.core.types import ReduceOp
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.timeline import TimelineFile
from hvdlite.negotiation.messages import TraceEvent
from hvdlite.runtime.runtime import Runtime
from tests.diagnostics.programs import timeline as programs
from tests.worlds import HANGS_SECONDS, TORCH, Processes, processes, threads


def test_calls_in_a_mailbox_are_one_line_of_a_tensors_story() -> None:
    now = iter(range(100))
    recorder = FlightRecorder("shm", lambda: float(next(now)))
    for name in ("x", "x", "y", "x"):
        recorder.finished(name, "a mailbox")
    recorder.split("bucket.1", ["x"])
    recorder.finished("x", "a mailbox")
    assert [line.partition("s ago: ")[2] for line in recorder.story("x").splitlines()] == [
        "3 times, the first 6.000 s ago: done in a mailbox",
        "to be negotiated one by one: its bucket was given up (bucket.1)", "done in a mailbox"]


def lanes(path: Path) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Return the events of each rank's tensors, in order, after checking that their spans nest."""
    return lanes_of(path.read_text())


def lanes_of(text: str) -> dict[tuple[int, str], list[dict[str, Any]]]:
    records = json.loads(text)
    names = {(record["pid"], record["tid"]): record["args"]["name"] for record in records
             if record.get("name") == "thread_name"}
    found: defaultdict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if record["ph"] != "M":
            found[record["pid"], names[record["pid"], record["tid"]]].append(record)
    for events in found.values():
        depth, last = 0, 0.0
        for event in events:
            if event["ph"] in "BE":
                depth += 1 if event["ph"] == "B" else -1
                assert depth >= 0 and event["ts"] >= last
                last = event["ts"]
    return found


def spans(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events if event["ph"] == "B"]


def test_every_write_leaves_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TimelineFile(str(path), 2)
    assert json.loads(path.read_text())
    for count in (1, 40):
        file.add(1, [TraceEvent("B", 1.5, f'odd "name" \n{each}\\', "ALLREDUCE") for each in range(count)])
        assert len(lanes(path)) == count
    file.close()
    file.add(0, [TraceEvent("B", 1.0, "late", "X")])
    assert 'odd \\"name\\"' in path.read_text() and "late" not in path.read_text()


@contextlib.contextmanager
def longest_file(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_for_which_the_disk_has_no_room_is_taken_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    for room in range(1000, 1200, 7):  # wherever the last write is cut
        caplog.clear()
        with longest_file(room):
            timeline = TimelineFile(str(path), 2)
            for number in range(20):
                timeline.add(0, [TraceEvent("i", 1.0 * number, f"tensor{number}", "event")])
            timeline.close()
        records = json.loads(path.read_text())
        assert len(records) > 5 and path.stat().st_size <= room
        told = [record.getMessage() for record in caplog.records]
        assert told in ([f"the timeline {path} ends here: no space left on the disk, or under `ulimit -f`"],
                        [f"the timeline {path} ends here: File too large"])  # when not one byte fits
    with longest_file(2), pytest.raises(ConfigError, match=r"trace.json: no space left on the disk"):
        TimelineFile(str(path), 2)


def test_phases_of_every_rank_on_one_clock(tmp_path: Path) -> None:
    first, second, unwritable = tmp_path / "one.json", tmp_path / "two.json", tmp_path / "no" / "such.json"

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        runtime.allreduce("before", np.ones(3), np.empty(3), ReduceOp.SUM).wait()
        if rank == 0:
            with pytest.raises(ConfigError, match="No such file"):
                runtime.start_timeline(str(unwritable))
        runtime.start_timeline(str(first), mark_cycles=True)
        runtime.barrier("started").wait()
        for name, size in (("small", 3), ("big", 100_000)):
            runtime.allreduce(name, np.ones(size), np.empty(size), ReduceOp.SUM).wait()
        runtime.allgather("rows", np.ones((rank + 1, 20_000))).wait()
        runtime.start_timeline(str(first))  # again: nothing
        runtime.stop_timeline()
        runtime.stop_timeline()
        runtime.barrier("between").wait()
        runtime.start_timeline(str(second))
        runtime.barrier("started again").wait()
        runtime.broadcast("after", np.ones(3), 0).wait()
    threads(3, step)
    found = lanes(first)
    for rank in range(3):
        assert spans(found[rank, "small"]) == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE"]  # it came with the decision
        assert spans(found[rank, "big"]) == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "LOOPBACK_ALLREDUCE"]
        assert "LOOPBACK_ALLGATHER" in spans(found[rank, "rows"])
        assert not any(name in ("before", "after") for _, name in found)
    ready = [event["name"] for event in found[0, "big"] if event["ph"] == "i"]
    assert sorted(ready) == ["0", "1", "2"] and all(event["name"] == "CYCLE_START" for event in found[0, "decisions"])
    moved = [event["ts"] for rank in range(3) for event in found[rank, "big"] if event.get("name") == "LOOPBACK_ALLREDUCE"]
    assert max(moved) - min(moved) < 5e6  # one clock: they did it together
    again = lanes(second)
    assert all("BROADCAST" in spans(again[rank, "after"]) for rank in range(3)) and (0, "big") not in again


def test_a_timeline_by_knob_holds_buckets_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    processes(2, programs.a_timeline_by_knob_holds_buckets_too, environment={"HOROVOD_TIMELINE": str(path)}, imported=TORCH)
    found = lanes(path)
    for rank in range(2):
        buckets = [name for each, name in found if each == rank and name.startswith("bucket.")]
        assert buckets and "SHM_ALLREDUCE" in spans(found[rank, buckets[0]])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_job_leaves_all_events_but_the_one_it_wrote(tmp_path: Path, victim: int) -> None:
    path = tmp_path / "trace.json"
    with Processes(2, programs.a_killed_job_leaves_all_events, environment={"HVDLITE_TIMELINE": str(path)}) as world:
        world.wait_for(victim, "ready")
        time.sleep(0.5)
        world.kill(victim, signal.SIGKILL)
        world.ranks[1 - victim].wait(HANGS_SECONDS)
    text = path.read_text()
    if not text.endswith("\n]\n"):  # SIGKILL hit a write
        assert victim == 0
        text = text[:text.rindex(",\n")] + "]"
    found = lanes_of(text)
    assert {rank for rank, _ in found} == {0, 1}
