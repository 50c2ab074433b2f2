"""Sends and receives between ranks as processes: real memory, several hosts, and ranks that die or leave."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.groups.programs import messages as programs
from tests.worlds import NUMPY, TORCH, Processes, processes, shared_memory

MANY_HOSTS = pytest.param((2, 1), TORCH, id="two hosts", marks=pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch, for Gloo"))


def test_batches_of_four_ranks(tmp_path: Path) -> None:
    before, sizes = shared_memory(), (0, 1, 4096, 1 << 20, 5 << 20, 18 << 20)
    assert [ended.result for ended in processes(4, programs.all_to_all, str(tmp_path), sizes)] == [18] * 4
    assert shared_memory() <= before


def test_batches_between_hosts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = processes(3, programs.all_to_all, str(tmp_path), (0, 1, 4096, 3 << 20), hosts=(2, 1), imported=TORCH)
    assert [each.result for each in ended] == [8] * 3


@pytest.mark.parametrize(("hosts", "imported"), [pytest.param((), NUMPY, id="one host"), MANY_HOSTS])
def test_a_death_ends_sends_and_receives(tmp_path: Path, hosts: tuple[int, ...], imported: tuple[str, ...]) -> None:
    with Processes(3, programs.death, str(tmp_path), hosts=hosts, imported=imported) as world:
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


def test_a_rank_of_another_host_that_leaves_ends_receives(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    _, second = processes(2, programs.waits_for_one_that_leaves, str(tmp_path), hosts=(1, 1), imported=TORCH)
    assert second.result.startswith("PeerLeftError: group 0: the receive on rank 1 from rank 0 (tag 7, 1 bytes) needs rank")
