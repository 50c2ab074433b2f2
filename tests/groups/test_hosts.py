"""Groups on several hosts or with runtimes of their own, as processes: who leaves, who does not come, circles of waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.groups.programs import hosts as programs
from tests.worlds import NUMPY, TORCH, processes, shared_memory

pytest.importorskip("torch")  # Gloo


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_leaves_is_named(tmp_path: Path, size: int) -> None:
    processes(size, programs.one_leaves, str(tmp_path), list(range(size))[::-1], hosts=[1, size - 1], imported=TORCH)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    processes(2, programs.one_does_not_come, str(tmp_path), 2, hosts=[1, 1], imported=TORCH)


def test_sends_that_nobody_receives_keep_nobody(tmp_path: Path) -> None:
    processes(2, programs.sends_that_nobody_receives, str(tmp_path), hosts=[1, 1], imported=TORCH)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_process_ends_in_order_after_a_rank_has_left(tmp_path: Path, blocking: bool) -> None:
    before = shared_memory()
    ended = processes(2, programs.exits_without_closing, str(tmp_path), blocking, hosts=[1, 1], imported=TORCH)
    assert ended[0].stdout == "PeerLeftError\n" and "terminate" not in ended[0].stderr
    assert shared_memory() <= before


@pytest.mark.parametrize("hosts", [[3], [1, 2]], ids=["one host", "two hosts"])
def test_ranks_that_wait_in_a_circle_of_groups(tmp_path: Path, hosts: list[int]) -> None:
    for ended in processes(3, programs.circle, str(tmp_path), 3, hosts=hosts, imported=TORCH if hosts[1:] else NUMPY):
        for rank in range(3):
            assert (f"rank {rank} waits for 'process group pair {rank}, call 2: barrier()', which rank {(rank + 1) % 3} has "
                    "not enqueued") in ended.stdout, ended


def test_no_circle_is_found_while_another_thread_may_come(tmp_path: Path) -> None:
    processes(2, programs.no_circle, str(tmp_path))


def test_calls_of_all_groups_are_in_a_timeline(tmp_path: Path) -> None:
    processes(2, programs.traced, str(tmp_path), environment={"HVDLITE_TIMELINE": str(tmp_path / "trace.json")})
    text = ": all_reduce(SUM, float32[4])"
    for name, groups in (("trace.json", {"world", "beside"}), ("trace.process-group-alone.json", {"alone"})):
        events = json.loads((tmp_path / name).read_text())
        lanes = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
        assert {lane for lane in lanes if "process group" in lane} == {f"process group {group}{text}" for group in groups}
        assert {event["pid"] for event in events if event.get("name") == "WAIT"} == {0, 1}
