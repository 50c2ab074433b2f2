"""Writers that a script makes on rank 0 only before `elastic.run`, without ranks and with two."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlite import api
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.elastic import loop
from hvdlite.training.elastic.comparison import ComparedState
from hvdlite.training.elastic.writers import names_of_writers
from tests.worlds import threads


class Checkpoint:
    """A writer."""


class BestCheckpoint(Checkpoint):
    """A writer of a derived class."""


class State(ComparedState):
    """A state without tensors, whose framework has a writer."""

    def _kinds_of_writers(self) -> tuple[type, ...]:
        return (Checkpoint,)

    def sync(self) -> None:
        self._compare({}, {})


MADE_BEFORE: list[object] = [BestCheckpoint(), "other"]


def names(func: Callable[..., Any], *given: Any) -> list[str]:
    return names_of_writers((Checkpoint,), func, *given)


def test_what_a_function_finds_around_it_was_made_before() -> None:
    callbacks, writer = {"best": Checkpoint()}, Checkpoint()
    unrelated = Checkpoint()

    def of_a_list() -> Any:
        return MADE_BEFORE

    def of_a_dict() -> Any:
        return callbacks

    def directly() -> Any:
        return writer, callbacks

    def of_none() -> Any:
        mine = [Checkpoint()]
        return mine

    assert unrelated and names(of_a_list) == ["BestCheckpoint"]
    assert names(of_a_dict) == names(directly) == ["Checkpoint"]
    assert names(functools.wraps(directly)(lambda: None)) == ["Checkpoint"], "what a decorator has wrapped"
    assert names(of_none) == [], "the function makes it"
    assert names(of_none, 1, (writer,)) == names(of_none, writer) == ["Checkpoint"]


def test_functions_that_cannot_be_looked_into() -> None:
    def train() -> Any:
        return later

    assert names(train) == names(functools.partial(int, "1")) == []
    assert names(functools.partial(int, "1"), Checkpoint()) == ["Checkpoint"]
    later = Checkpoint()
    assert names(train) == ["Checkpoint"]


@pytest.mark.parametrize("is_elastic", [True, False])
def test_run_notes_them_in_elastic_jobs_only(monkeypatch: pytest.MonkeyPatch, is_elastic: bool) -> None:
    """In a job of a fixed size rank 0 stays the same process."""
    member = object() if is_elastic else None
    monkeypatch.setattr(api, "worlds", lambda: SimpleNamespace(elastic_run=lambda: contextlib.nullcontext(member)))
    monkeypatch.setattr(loop, "_Training", lambda member, state, call: SimpleNamespace(run=call))
    state = State()
    monkeypatch.setattr(state, "sync", lambda: None)
    assert loop.run(lambda state, *args, **kwargs: 5)(state, 1, callbacks=[Checkpoint()]) == 5
    assert state._writers == (["Checkpoint"] if is_elastic else ())


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.local]:
    own = threading.local()
    monkeypatch.setattr(api, "runtime", lambda: own.runtime)
    yield own


@pytest.mark.parametrize(("on", "warned"), [((0,), True), ((0, 1), False), ((1,), False), ((), False), ((0, 2), True)])
def test_one_rank_warns_of_what_would_be_lost_with_rank_0(runtimes: threading.local, on: tuple[int, ...],
                                                         warned: bool) -> None:
    def step(runtime: Runtime) -> None:
        runtimes.runtime = runtime
        state = State()
        callbacks = [Checkpoint()] if runtime.world.rank in on else []
        state._note_writers(lambda: callbacks)
        state.sync()
        state.sync()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        threads(3, step)
    texts = [str(each.message) for each in caught]
    assert len(texts) == warned, texts
    assert all("rank 0 has a Checkpoint that was made before hvd.elastic.run, and rank 1 has none" in each for each in texts)
