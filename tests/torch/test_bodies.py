"""Loops that count bodies: a lost rank costs no finished step; see docs/protocol.md#bodies."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.elastic_jobs import ElasticJob  # noqa: E402
from tests.torch.programs import bodies as programs  # noqa: E402
from tests.worlds import TORCH  # noqa: E402

BODIES, AT = 12, 7


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(("where", "again"), [("before", AT), ("after", AT + 1), ("copy", AT), ("between", 5)])
def test_no_step_is_lost_or_repeated_when_a_rank_is_lost(victim: int, where: str, again: int) -> None:
    commit_every = 5 if where == "between" else 0
    with ElasticJob(programs.count, BODIES, victim, where, AT, commit_every, slots={"a": 3}, min_np=1, hosts_are_fixed=True,
                    imported=TORCH) as job:
        results = job.finish()
        order = job.orders[2]
    survivors = [member for member in range(3) if member != victim]
    assert sorted(results) == survivors and order.restore == (where == "between"), order
    expected = programs.undisturbed(BODIES)
    for member in survivors:
        assert results[member]["parameters"] == pytest.approx(expected, abs=1e-9, rel=0), f"member {member}"
        ran = results[member]["ran"]
        assert [body for body, size in ran if size == 2] == list(range(again, BODIES)), ran
        assert len([body for body, size in ran if size == 3]) in (AT, AT + 1, AT + 2), ran
