"""Which tensors replicas take over from replica 0, and what they say when they differ. Without ranks: replies are given."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlite.core.errors import MismatchError
from hvdlite.training.mirrored.mirroring import MirrorSchedule, TensorKind, agreed_names, matching_tensors


class Tensor:
    """Stands for a framework's tensor; equal only to itself."""

    def __init__(self, *shape: int, is_lazy: bool = False) -> None:
        self.kind = TensorKind(None if is_lazy else shape, "float32", True, "cpu")


class Replies:
    """Stands for the other replicas: each kind of call gets the given reply, or this replica's own value."""

    replica_id = 1

    def __init__(self, **replies: Any) -> None:
        self.replies = replies
        self.asked: list[str] = []

    def broadcast_object(self, value: Any, kind: str) -> Any:
        return self.replies.get(kind, value)

    def allgather_object(self, value: Any, kind: str) -> list[Any]:
        return [self.replies.get(kind, value), value]

    def ask(self, kind: str, flag: bool) -> Any:
        self.asked.append(kind)
        return lambda: self.replies.get("flag", False) or flag


def matched(named: dict[str, Tensor], listed: Any = None) -> list[Any]:
    replies: Any = Replies() if listed is None else Replies(mirror=listed)
    return matching_tensors(replies, named, lambda each: each.kind, lambda kind: kind)


def test_tensors_are_found_under_any_of_replica_0s_names() -> None:
    tied, other = Tensor(2), Tensor(3)
    named = {"a": tied, "b": tied, "c": other, "mine alone": Tensor(1)}
    assert matched(named, [(["x", "b"], tied.kind), (["c"], other.kind)]) == [tied, other]
    missing = Tensor(4).kind
    assert matched(named, [(["b"], tied.kind), (["a"], tied.kind), (["d"], missing)]) == [tied, tied.kind, missing]
    lazy = Tensor(is_lazy=True)
    assert matched({"a": tied, "lazy": lazy}) == [tied]
    with pytest.raises(MismatchError, match=r"'a' is float32 \[5\] on replica 0 and float32 without a shape yet on"):
        matched({"a": lazy}, [(["a"], Tensor(5).kind)])


def test_parameters_of_an_optimizer_have_replica_0s_names() -> None:
    own = [("a", Tensor(2).kind), ("b", Tensor(3).kind)]
    assert agreed_names(Replies(optimizer=[("x", own[0][1]), ("y", own[1][1])]), own) == ["x", "y"]  # type: ignore[arg-type]
    for theirs, told in (([("x", Tensor(4).kind), own[1]],
                          r"parameter 0: replica 0 has 'x', float32 \[4\], replica 1 'a', float32 \[2\]"),
                         (own[:1], r"parameter 1: replica 0 has no more, replica 1 'b', float32 \[3\]"),
                         ([*own, own[0]], "parameter 2: replica 0 has 'a', .* replica 1 no more")):
        with pytest.raises(MismatchError, match=told):
            agreed_names(Replies(optimizer=theirs), own)  # type: ignore[arg-type]


def test_a_reason_of_one_replica_is_heard_once_a_step() -> None:
    replies, has_new = Replies(), []
    schedule = MirrorSchedule(replies, lambda: bool(has_new))  # type: ignore[arg-type]
    schedule.ask_in_step(0)
    schedule.ask_in_step(0)
    schedule.has_loaded = True  # too late for this question
    schedule.agree_in_step(0)
    assert not schedule.due and replies.asked == ["loaded.0"]
    schedule.agree_in_step(0)
    assert schedule.due
    schedule.done()
    assert not schedule.due and not schedule.is_wanted
    has_new.append(1)
    schedule.agree()
    assert schedule.due
    has_new.clear()
    schedule.done()
    replies.replies["flag"] = True  # another replica's
    schedule.agree()
    assert schedule.due
