"""Comparison and fusion: requests in, sentences and responses out."""

import msgspec
import pytest

from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.agreement import disagreement
from hvdlite.negotiation.fusion import fuse, payload_bytes, response_to
from hvdlite.negotiation.messages import Request, Response

REQUEST = Request("x", Collective.ALLREDUCE, "float32", (2, 3))


@pytest.mark.parametrize(("field", "value", "told"), [
    ("shape", (3, 2), "[3, 2]"),
    ("dtype", "float64", "float64"),
    ("op", ReduceOp.MAX, "Max"),
    ("collective", Collective.BARRIER, "barrier"),
    ("prescale", 0.5, "0.5"),
    ("postscale", 2.0, "2.0"),
    ("device", "cuda", "cuda"),
    ("sharded", True, "the value of sharded= for the optimizer of"),
])
def test_a_disagreement_names_the_ranks_and_both_values(field: str, value: object, told: str) -> None:
    other = msgspec.structs.replace(REQUEST, **{field: value})
    problem = disagreement({0: REQUEST, 1: other, 2: REQUEST})
    assert problem is not None
    assert "'x'" in problem and "ranks 0, 2" in problem and "rank 1" in problem and told in problem


def test_allgather_may_differ_in_the_first_dimension_only() -> None:
    rows = {rank: Request("g", Collective.ALLGATHER, "int32", (rank, 4)) for rank in range(3)}
    assert disagreement(rows) is None
    rows[1] = Request("g", Collective.ALLGATHER, "int32", (1, 5))
    assert "[5]" in str(disagreement(rows))


def test_broadcast_roots_must_agree() -> None:
    roots = {rank: Request("b", Collective.BROADCAST, "int32", (4,), root_rank=rank) for rank in range(2)}
    assert "root rank" in str(disagreement(roots))


# docs/protocol.md#contributors
def test_absent_ranks_agree_but_do_not_contribute() -> None:
    requests = {0: REQUEST, 1: msgspec.structs.replace(REQUEST, absent=True)}
    assert disagreement(requests) is None
    assert response_to(requests, (0, 1)).contributors == (0,)


def _response(name: str, **fields: object) -> Response:
    return Response(names=(name,), collective=Collective.ALLREDUCE, dtype="float32", contributors=(0, 1),
                    **fields)  # type: ignore[arg-type]


def test_fusion_stops_at_the_threshold_and_keeps_order() -> None:
    fused = fuse([(_response(name), 40) for name in "abcde"], threshold=100)
    assert [response.names for response in fused] == [("a", "b"), ("c", "d"), ("e",)]


def test_a_tensor_over_the_threshold_travels_alone() -> None:
    fused = fuse([(_response("a"), 10), (_response("big"), 1000), (_response("c"), 10)], threshold=100)
    assert ("big",) in [response.names for response in fused]


def test_threshold_zero_turns_fusion_off() -> None:
    assert len(fuse([(_response(name), 4) for name in "abc"], threshold=0)) == 3


@pytest.mark.parametrize("field", [{"op": ReduceOp.MAX}, {"prescale": 2.0}, {"postscale": 2.0}, {"process_set_id": 1}])
def test_only_equal_operations_are_fused(field: dict[str, object]) -> None:
    fused = fuse([(_response("a"), 4), (_response("b", **field), 4), (_response("c"), 4)], threshold=100)
    assert [response.names for response in fused] == [("a", "c"), ("b",)]


def test_different_contributors_are_not_fused() -> None:
    partial = msgspec.structs.replace(_response("b"), contributors=(0,))
    assert len(fuse([(_response("a"), 4), (partial, 4)], threshold=100)) == 2


def test_payload_of_a_scalar_and_of_nothing() -> None:
    assert payload_bytes(Request("s", Collective.ALLREDUCE, "bfloat16", ())) == 2
    assert payload_bytes(Request("e", Collective.ALLREDUCE, "float64", (0, 7))) == 0
