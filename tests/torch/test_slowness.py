"""A slow rank, its cause, and the time in which torch's loaders are asked for batches; see `tests.torch.slowness`, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worlds import TORCH, processes

pytest.importorskip("torch")

from tests.torch.programs import slowness as programs


def test_a_rank_that_loads_slowly_is_named_on_all_ranks() -> None:
    ended = processes(2, programs.slow_input, 1, imported=TORCH)
    (found, logged), (other, nothing) = (rank.result for rank in ended)
    assert (found["rank"], found["cause"]) == (1, "input") and "rank 1 is late" in found["text"]
    assert other == found and not nothing, "rank 0 writes"
    assert logged["hvdlite/slow_rank"] == 1 and logged["hvdlite/waits/rank_0"] > logged["hvdlite/waits/rank_1"]


@pytest.mark.parametrize("under", ["ddp", "fsdp2"])
def test_it_is_named_under_torchs_wrappers_too(under: str, tmp_path: Path) -> None:
    """DDP waits in C++ for futures, and FSDP2 for works."""
    for rank in processes(2, programs.slow_input, 1, under, str(tmp_path), imported=TORCH):
        found, _ = rank.result
        assert (found["rank"], found["cause"]) == (1, "input")
