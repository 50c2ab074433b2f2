"""One rank's end of a mailbox: what it takes, threads that wait in it, and threads that are interrupted."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.types import Collective
from hvdlite.handoff.exchange import MailboxCall, Signature
from hvdlite.handoff.mailbox import MailboxEnd
from hvdlite.memory import futex
from hvdlite.memory.area import Area, area_bytes
from hvdlite.memory.patience import Patience
from hvdlite.negotiation.messages import Mailbox
from hvdlite.planes.arithmetic import Casts, Reduction
from tests.worlds import HANGS_SECONDS

CAPACITY = 256


def ends(size: int) -> tuple[list[MailboxEnd], list[Any], list[MailboxCall]]:
    """Return all ranks' ends, what they post to the background thread, and the calls that are over."""
    memory, posted, over = bytearray(area_bytes(size, CAPACITY)), [], []  # type: ignore[var-annotated]
    inbox: Any = types.SimpleNamespace(post=posted.append, release=lambda key: None)
    mailbox = Mailbox(mailbox_id=1, stem="x", process_set_id=0, area=0, capacity=CAPACITY, first_round=1)
    return [MailboxEnd(mailbox, tuple(range(size)), Area(memory, rank, size, CAPACITY), Casts.of_numpy(), inbox,
                       over.append, Patience(0.0)) for rank in range(size)], posted, over


def call(value: float, elements: int = 1, name: str = "x") -> MailboxCall:
    return MailboxCall((0, name), Signature(name, Collective.ALLREDUCE, "float64", (elements,)), 1, np.full(elements, value),
                       np.zeros(elements), lambda: "an entry")  # type: ignore[arg-type, return-value]


def exchange(end: MailboxEnd, made: MailboxCall) -> bool:
    return end.exchange(made, lambda: 0.0, lambda _: None)


def thread_of(run: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.skipif(not futex.AVAILABLE, reason="needs futexes")
def test_threads_exchange_values() -> None:
    both, _, over = ends(2)
    sums: list[list[float]] = [[], []]

    def step(rank: int) -> None:
        for index in range(200):
            made = call(index + rank)
            assert exchange(both[rank], made)
            sums[rank].append(made.output[0])

    threads = [thread_of(lambda rank=rank: step(rank)) for rank in range(2)]  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert sums == [[2.0 * index + 1 for index in range(200)]] * 2
    assert len(over) == 400 and both[0].last_round == both[1].last_round == 200


def test_what_a_mailbox_does_not_take() -> None:
    (end, _), _, _ = ends(2)
    assert not exchange(end, call(1.0, elements=CAPACITY))
    assert not exchange(end, call(1.0, name="x" * 2000))
    assert not end.has_call
    assert end.write(call(1.0)) and not end.write(call(1.0, name="y")), "it serves one call at a time"
    assert end.has_call, "a loss of a peer is told by the thread that waits, and not logged, too"
    end.freeze()
    assert not end.write(call(1.0))


@pytest.mark.skipif(not futex.AVAILABLE, reason="needs futexes")
def test_a_thread_that_waits_is_told_of_the_end() -> None:
    (end, other), _, over = ends(2)
    failed: list[BaseException] = []
    waits = threading.Event()

    def wait() -> None:
        def block() -> float:
            waits.set()
            return 0.0
        try:
            end.exchange(call(1.0), block, lambda _: None)
        except HorovodInternalError as error:
            failed.append(error)

    thread = thread_of(wait)
    waits.wait()
    end.fail(HorovodInternalError("the job has ended"))
    thread.join()
    assert [str(error) for error in failed] == ["the job has ended"] and len(over) == 1
    made = call(2.0)
    assert exchange(other, made) and made.output[0] == 3.0, "what it has written counts"


def test_a_thread_that_is_interrupted_while_it_writes_has_not_taken_part(monkeypatch: pytest.MonkeyPatch) -> None:
    (end, other), posted, over = ends(2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reduction, "copy_prescaled", interrupt)
    with pytest.raises(KeyboardInterrupt):
        exchange(end, call(1.0))
    monkeypatch.undo()
    assert len(posted) == 1 and not over and end.last_round == 0
    assert other.write(call(1.0))
    assert end.close() is None and len(over) == 1 and not over[0].is_done, "its name is free again"
    assert other.close() == "an entry"


def test_what_waits_for_a_lock_is_done_later_if_its_holder_is_interrupted_as_it_leaves() -> None:
    (end, _), _, _ = ends(2)
    has_lock, leaves, done = threading.Event(), threading.Event(), []

    def hold() -> None:
        with end._lock:
            has_lock.set()
            leaves.wait(HANGS_SECONDS)

    thread = thread_of(hold)
    has_lock.wait()
    end.when_unlocked(lambda: done.append(end.freeze()))
    end.act()
    assert end.is_busy and not done
    leaves.set()
    thread.join()
    end.act()
    assert not end.is_busy and done == [0]


def test_what_an_interrupted_thread_has_written_counts() -> None:
    (end, other), posted, over = ends(2)
    first, second = call(1.0), call(2.0)
    assert end.write(first)
    end.abandon(first)
    assert posted and not over
    assert exchange(other, second) and second.output[0] == 3.0
    assert end.close() is None and over == [second, first] and first.output[0] == 3.0


def test_the_background_thread_never_waits_for_a_thread_that_writes() -> None:
    """A signal handler may have interrupted that thread, and wait for the background thread."""
    (end, *_), posted, _ = ends(2)
    frozen: list[int] = []
    with end._lock:
        background = thread_of(lambda: end.when_unlocked(lambda: frozen.append(end.freeze())))
        background.join(HANGS_SECONDS)
        assert not background.is_alive() and end.is_busy and not frozen
    assert not exchange(end, call(1.0, elements=CAPACITY)), "it is too large"
    for task in posted:
        task.run()
    assert frozen == [0] and not end.is_busy and not exchange(end, call(1.0))
