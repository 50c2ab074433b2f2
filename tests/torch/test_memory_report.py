"""What each rank's memory is used for."""

from __future__ import annotations

import pytest

from tests.worlds import processes

pytest.importorskip("torch")

from tests.torch.programs import memory_report as programs

PARAMETERS = (500 * 1000 + 500 + 2 * 500) * 4
BUFFERS = 2 * 500 * 4 + 8


def test_every_byte_counts_once() -> None:
    (before, after, text), other = (rank.result for rank in processes(2, programs.train, imported=["hvdlite_torch"]))
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
