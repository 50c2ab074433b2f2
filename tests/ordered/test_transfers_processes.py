"""Sends and receives between ranks as processes: real memory, and ranks that die or leave."""

from __future__ import annotations

from pathlib import Path

from tests.ordered.programs import messages as programs
from tests.worlds import Processes, processes, shared_memory


def test_batches_of_four_ranks(tmp_path: Path) -> None:
    before = shared_memory()
    assert [ended.result for ended in processes(4, programs.all_to_all, str(tmp_path))] == [18] * 4
    assert shared_memory() <= before


def test_a_death_ends_sends_and_receives(tmp_path: Path) -> None:
    with Processes(3, programs.death, str(tmp_path)) as world:
        world.wait_for_all("ready")
        world.kill(1)
        first, _, third = world.wait()
    for ended in (first, third):
        assert ended.code == 0, ended
        assert "PeerLostError" in ended.result and "rank 1" in ended.result


def test_what_a_process_has_sent_outlives_it(tmp_path: Path) -> None:
    _, second = processes(2, programs.last_words, str(tmp_path))
    assert second.result == ("PeerLeftError: group 0: the receive on rank 1 from rank 0 (tag 7, 1 bytes) needs rank 0, "
                             "which left the group (its process ended, or destroyed the group)")
