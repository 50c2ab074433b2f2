"""`outer=` in elastic jobs; what ranks have at the beginning of a world: tests/training/outer/test_recovery.py."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.elastic.outer import one
from tests.elastic_jobs import ElasticJob
from tests.torch.programs import outer_elastic as programs
from tests.worlds import TORCH


@pytest.mark.parametrize("seed", [10, 28])
def test_members_are_lost_at_random_moments(seed: int) -> None:
    """With bodies, and with commits. More: `python -m tests.elastic --outer`."""
    _, _, problem = one(seed)
    assert not problem, problem


def test_who_joins_gets_the_moments_of_rank_0_and_the_others_keep_theirs() -> None:
    with ElasticJob(programs.grow, 9, slots={"a": 1, "b": 1}, imported=TORCH) as job:
        job.until_printed(1, "step 6")
        job.see({"a": 1, "b": 1, "c": 1})
        found = job.finish()
        assert max(job.orders) == 2 and not job.orders[2].restore, job
    assert all(found[member]["begun"] == found[member]["ended"] for member in (0, 1)), found
    assert found[2]["begun"] == found[0]["begun"] != found[1]["begun"], found
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]


def test_what_is_refused(tmp_path: Path) -> None:
    with ElasticJob(programs.refused, str(tmp_path), slots={"a": 1, "b": 1}, imported=TORCH) as job:
        found = job.finish()
    for rank in (0, 1):
        sets, checkpoint, step = found[rank]
        assert 'workers= is "host" or "rank"' in sets and "torch.save" in checkpoint, found
        assert f"rank {rank}: outer=" in step and "TorchState(model, optimizer)" in step, found
