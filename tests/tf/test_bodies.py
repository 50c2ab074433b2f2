"""Loops of Keras that count bodies; see docs/protocol.md#bodies."""

from __future__ import annotations

import pytest

from tests.elastic_jobs import ElasticJob
from tests.tf.support import BACKENDS, ENVIRONMENT, imported

BODIES, AT = 8, 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("where", "again"), [("before", AT), ("after", AT + 1), ("copy", AT)])
def test_no_step_is_lost_or_repeated_when_a_rank_is_lost(backend: str, where: str, again: int) -> None:
    with ElasticJob("tests.tf.programs.bodies:count", BODIES, 0, where, AT, slots={"a": 3}, min_np=1, hosts_are_fixed=True,
                    imported=imported(backend), environment={**ENVIRONMENT, "KERAS_BACKEND": backend}) as job:
        results = job.finish(120)
        assert job.orders[2].restore == (backend == "jax"), f"{job}"
    if backend == "jax":
        again = 0  # there are no commits
    near = 1e-9 if backend == "tensorflow" else 1e-6  # the others compute in float32 here and there
    for member in (1, 2):
        assert results[member]["parameters"] == pytest.approx(results[member]["alone"], abs=near, rel=0), f"member {member}"
        assert [body for body, size in results[member]["ran"] if size == 2] == list(range(again, BODIES))
