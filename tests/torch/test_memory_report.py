"""What each rank's memory is used for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worlds import TORCH, processes

pytest.importorskip("torch")

from tests.torch.programs import memory_report as programs

PARAMETERS = (500 * 1000 + 500 + 2 * 500) * 4
BUFFERS = 2 * 500 * 4 + 8


@pytest.mark.slow
def test_every_byte_counts_once() -> None:
    (before, after, text), other = (rank.result for rank in processes(2, programs.train, imported=TORCH))
    assert other == (before, after, text) and len(after) == 2
    for parts in before:
        assert parts["parameters"] == PARAMETERS + BUFFERS
        assert parts["gradients"] == parts["optimizer"] == parts["buckets"] == 0
    for parts in after:
        assert parts["parameters"] == PARAMETERS + BUFFERS and parts["optimizer"] == PARAMETERS
        assert parts["gradients"] == 0, "they lie in buckets"
        assert PARAMETERS <= parts["buckets"] < PARAMETERS + 4096
        assert parts["staging"] >= 1 << 20 and parts["peak"] >= parts["process"] > parts["buckets"]
    assert text.splitlines()[0].split()[:3] == ["rank", "parameters,", "MiB"] and len(text.splitlines()) == 3


@pytest.mark.slow
def test_sparse_and_sharded_tensors_and_nested_state(tmp_path: Path) -> None:
    for rank in processes(2, programs.unusual, str(tmp_path), imported=TORCH):
        embedding, state, compressed, shard, gradient = rank.result
        assert embedding == 3 * 8 * 4 + 3 * 8 and compressed == 5 * 8 + 2 * 4
        assert state >= 4 * 10 * 4, "the direction and two lists of differences"
        assert shard == gradient == 4 * 3 * 4, "half of it is here"
