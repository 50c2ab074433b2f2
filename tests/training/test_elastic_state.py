"""States of elastic training, without ranks: what a commit keeps, what a failure leaves, what is sent."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hvdlite
from hvdlite import boundaries
from hvdlite.core.errors import HostsUpdatedInterrupt, UnsupportedError
from hvdlite.training import elastic
from hvdlite.training.elastic import loop
from hvdlite.training.elastic.state import ObjectState, State
from hvdlite.training.replicas import named_parts


class Wire:
    """A broadcast between states that are synchronised one after the other, rank 0's first."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def root(self, value: Any) -> Any:
        self.sent.append(value)
        return value

    def other(self, value: Any) -> Any:
        return self.sent.pop(0)


def state(**attributes: Any) -> Any:
    return ObjectState(lambda value: value, lambda: 0, **attributes)


def test_scripts_with_numpy_only_have_it_by_name() -> None:
    assert hvdlite.elastic.run is elastic.run and hvdlite.elastic.ObjectState is ObjectState


def test_restore_goes_back_to_the_last_commit_and_copies_are_deep() -> None:
    own = state(epoch=1, history=[1], nested={"best": [0.5]})
    own.epoch, own.nested["best"][0] = 2, 0.75
    own.history.append(2)
    own.commit()
    for _ in range(2):  # what is restored may be changed, too
        own.epoch = 3
        own.history.append(3)
        own.nested["best"].append(1)
        own.restore()
        assert (own.epoch, own.history, own.nested) == (2, [1, 2], {"best": [0.75]})
    assert own._commits == 1


def test_commits_is_a_name_for_scripts() -> None:
    own = state(commits=5)
    own.commits += 1
    own.commit()
    own.commits += 1
    own.restore()
    assert (own.commits, own._commits) == (6, 1)


def test_run_refuses_what_is_no_state() -> None:
    @elastic.run
    def train(state: Any) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match=r"the first argument of train\(\) must be an elastic state.* it is a dict"):
        train({"epoch": 0})


def test_what_is_made_counts_as_commit_0() -> None:
    own = state(epoch=1)
    own.epoch = 2
    own.restore()
    assert (own.epoch, own._commits) == (1, 0)


def test_plain_data_that_is_assigned_later_belongs_to_the_state() -> None:
    wire = Wire()
    root, other = ObjectState(wire.root, epoch=1), ObjectState(wire.other, epoch=0)
    root.best, root.table, root._own, root.lock = 0.5, {"a": np.arange(3)}, "mine", threading.Lock()
    root.commit()
    root.best = 0.25
    root.table["a"][0] = 9
    root.restore()
    assert root.best == 0.5 and root.table["a"].tolist() == [0, 1, 2]
    root.sync()
    other.sync()
    assert (other.best, other.epoch, other._commits) == (0.5, 1, 1) and not hasattr(other, "_own")
    assert other.table["a"].tolist() == [0, 1, 2] and not hasattr(other, "lock")


def test_sync_sends_what_there_is_now_and_saves_it() -> None:
    wire = Wire()
    root, other = ObjectState(wire.root, epoch=1, names=["a"]), ObjectState(wire.other, epoch=7, names=[])
    root.commit()
    root.epoch = 2
    root.sync()
    other.sync()
    for own in (root, other):
        own.epoch = 9
        own.names.append("b")
        own.restore()
        assert (own.epoch, own.names, own._commits) == (2, ["a"], 1)


def test_attributes_that_share_an_object_go_on_sharing_it() -> None:
    shared = [1]
    own = state(one=shared, two={"same": shared})
    own.restore()
    assert own.one is own.two["same"] and own.one is not shared


def test_what_cannot_be_copied_is_named_at_once() -> None:
    with pytest.raises(UnsupportedError, match="attribute 'guard' of the elastic state cannot be pickled: it is a lock"):
        state(epoch=1, guard=threading.Lock())
    with pytest.raises(ValueError, match="the name commit itself"):
        state(commit=1)


class Brittle:
    """Fails to be copied when it is told to."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        self.error = error

    def __deepcopy__(self, memo: dict[int, Any]) -> Brittle:
        if self.error is not None:
            raise self.error("too large")
        return Brittle()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, ValueError])
def test_a_commit_that_fails_leaves_the_one_before(error: type[BaseException]) -> None:
    own = state(a=1, brittle=Brittle(), z=1)
    own.commit()
    own.a = own.z = 2
    own.brittle = Brittle(error)
    with pytest.raises(UnsupportedError if error is ValueError else error, match="too large"):
        own.commit()
    own.restore()
    assert (own.a, own.z, own.brittle.error, own._commits) == (1, 1, None, 1)


def test_what_cannot_be_pickled_is_told_to_all_ranks() -> None:
    wire = Wire()
    root, other = ObjectState(wire.root, epoch=1), ObjectState(wire.other, epoch=0)
    root.epoch = threading.Lock()
    for own in (root, other):
        with pytest.raises(UnsupportedError, match=r"rank 0: attribute 'epoch'.*cannot be pickled"):
            own.sync()
    assert other.epoch == 0


def test_states_of_other_parts_are_an_error_that_changes_nothing() -> None:
    wire = Wire()
    root, other = ObjectState(wire.root, epoch=1, best=0.5), ObjectState(wire.other, epoch=0, last=2)
    root.table = [1]  # assigned later: no part of what the state was made of
    root.sync()
    with pytest.raises(ValueError, match=r"rank 0's elastic state has best, epoch, and rank \?'s has epoch, last"):
        other.sync()
    assert (other.epoch, other.last) == (0, 2) and not hasattr(other, "best")


def test_callbacks_run_in_order_after_reset() -> None:
    calls: list[str] = []

    class Own(ObjectState):
        def reset(self) -> None:
            calls.append("reset")

    own = Own(lambda value: value)
    own.register_reset_callbacks([lambda: calls.append("first")])
    own.register_reset_callbacks([lambda: calls.append("second"), lambda: calls.append("third")])
    own.on_reset()
    assert calls == ["reset", "first", "second", "third"]


def test_a_commit_is_saved_before_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    class Own(ObjectState):
        def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
            told.append(update_res)

    def interrupt() -> None:
        raise HostsUpdatedInterrupt

    own = Own(lambda value: value, batch=0)
    monkeypatch.setattr(boundaries, "boundary", interrupt)
    own.batch = 1
    with pytest.raises(HostsUpdatedInterrupt):
        own.commit()
    with pytest.raises(HostsUpdatedInterrupt):
        own.check_host_updates()
    own.batch = 2
    own.restore()
    assert (own.batch, own._commits, told) == (1, 1, [3, 3])


def test_a_state_of_ones_own() -> None:
    class Own(State):
        def __init__(self) -> None:
            self.value = 0  # without the base's constructor

        def save(self) -> None:
            self.saved = self.value

        def restore(self) -> None:
            self.value = self.saved

    own = Own()
    own.register_reset_callbacks([])
    own.value = 1
    own.commit()
    own.value = 2
    own.restore()
    own.on_reset()
    assert (own.value, own._commits) == (1, 1)
    with pytest.raises(NotImplementedError, match="State does not define restore"):
        State().restore()


def test_a_member_that_joins_makes_its_copies_before_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first touch of memory took four fifths of a join's time."""
    done: list[str] = []

    class Own(ObjectState):
        def save(self) -> None:
            super().save()
            done.append("saved")

    def next_order() -> Any:
        raise KeyboardInterrupt

    worlds = SimpleNamespace(coordinates=SimpleNamespace(epoch=0), followers=SimpleNamespace(collect=lambda: None))
    monkeypatch.setattr(loop, "api", SimpleNamespace(is_provisional=lambda: True, worlds=lambda: worlds))
    member: Any = SimpleNamespace(ready=lambda: done.append("ready"), next_order=next_order)
    with pytest.raises(KeyboardInterrupt):
        loop._Training(member, Own(lambda value: value, lambda: 0, epoch=1), lambda: None).run()
    assert done == ["saved", "ready"]


def test_plain_data_and_arrays_are_compared_whatever_their_order_in_memory() -> None:
    """See docs/protocol.md#equal-replicas."""
    def parts(**attributes: Any) -> dict[str, bytes]:
        return {name: part.tobytes() for name, part in named_parts("state", attributes, lambda name, value: None)}

    words = [f"word {number}" for number in range(100)]
    one = parts(words=set(words), table={"a": [1, None, True], 2: (np.arange(6).reshape(2, 3).T, "x")})
    other = parts(table={2: (np.arange(6).reshape(2, 3).T.copy(), "x"), "a": [1, None, True]}, words=set(reversed(words)))
    assert one == other
    assert sorted(one) == ["state.table.2.0", "state.table.2.1", "state.table.a", "state.words"]
    assert parts(zero=0.0) != parts(zero=-0.0) and parts(number=1) != parts(number=True)
    loop: list[Any] = [object(), np.array([object()]), np.longdouble(1), np.zeros(2, np.dtype("i1,f8", align=True))]
    loop.append(loop)
    assert parts(loop=loop) == {}, "what cannot be compared is left out"
    assert parts(long=10**9999)
