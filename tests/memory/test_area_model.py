"""A model of what ranks write in an area and of its end: all interleavings of their steps, and all orders of their accesses.

The first half explores calls that bring their values (docs/protocol.md#areas): a rank writes its values, then its number;
when all numbers are there it may reduce its slice, and collects the others' slices or, where they have not come, reduces
from the values. At any time the use of the area ends in two decisions (decision 36): all freeze; when all have said so, each
one takes what is complete, and makes a request of the rest. Threads may be interrupted after they have written. There
accesses take effect in the order of the program. The second half has machines that reorder them, and fences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.planes.test_memory_order import Event, Machine, Program, aarch64, failure, weak, x86

IDLE, VALUES_WRITTEN, WRITTEN, REDUCED = range(4)
"""How far a rank is in its call."""
NOT_ENDED, FREEZING, CLOSING = range(3)
"""The decisions about the end."""

Places = tuple[tuple[int, ...], ...]
"""For each rank and place: the round of what is there."""


class Rank(NamedTuple):
    written: int = 0  # the last round whose number it has written
    done: int = 0  # the last one whose outcome it knows
    step: int = IDLE
    is_frozen: bool = False  # it writes nothing any more
    is_here: bool = True  # its thread is not interrupted
    is_closed: bool = False  # it has seen the second decision


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    values: Places
    numbers: Places
    slices: Places
    end: int = NOT_ENDED
    outcomes: frozenset[tuple[int, int, str]] = frozenset()  # rank, round, "done" or "request"

    def with_rank(self, index: int, rank: Rank, outcome: str = "") -> State:
        told = {(index, rank.done, outcome)} if outcome else set()
        return self._replace(ranks=_set(self.ranks, index, rank), outcomes=self.outcomes | told)


def _set(old: tuple, index: int, new: object) -> tuple:  # type: ignore[type-arg]
    return (*old[:index], new, *old[index + 1:])


class Broken(Exception):
    """A rank has read what it must not, or ranks disagree."""


class Model:
    """The steps of some ranks that make calls.

    Args:
        places: of each rank; rounds take turns.
        freezes: whether the second decision waits until all ranks have frozen.
        interrupts: whether threads may be interrupted after they have written, which makes many states.
    """

    def __init__(self, ranks: int, rounds: int, *, places: int = 2, freezes: bool = True, interrupts: bool = True) -> None:
        self._ranks, self._rounds, self._places = ranks, rounds, places
        self._freezes, self._interrupts = freezes, interrupts
        self.states = 0

    def explore(self) -> None:
        """Visit all states; raise `Broken` in one that must not be."""
        nothing = ((0,) * self._places,) * self._ranks
        begin = State((Rank(),) * self._ranks, nothing, nothing, nothing)
        seen, stack = {begin}, [begin]
        while stack:
            state = stack.pop()
            following = list(self._following(state))
            if not following:
                self._check_end(state)
            for each in following:
                if each not in seen:
                    seen.add(each)
                    stack.append(each)
        self.states = len(seen)

    def _following(self, state: State) -> Iterator[State]:
        for index, rank in enumerate(state.ranks):
            yield from self._write(state, index, rank)
            yield from self._collect(state, index, rank)
            yield from self._interrupt(state, index, rank)
            yield from self._finish(state, index, rank)
        if state.end == NOT_ENDED:
            yield state._replace(end=FREEZING)
        if state.end == FREEZING and (all(rank.is_frozen for rank in state.ranks) or not self._freezes):
            yield state._replace(end=CLOSING)

    def _write(self, state: State, index: int, rank: Rank) -> Iterator[State]:
        """Begin a call when the one before is done: the values, then the number."""
        if not rank.is_here or rank.is_frozen or rank.written != rank.done:
            return
        next_round = rank.written + 1
        if rank.step == IDLE and rank.written < self._rounds:
            yield state.with_rank(index, rank._replace(step=VALUES_WRITTEN))._replace(
                values=self._put(state.values, index, next_round))
        elif rank.step == VALUES_WRITTEN:
            yield state.with_rank(index, rank._replace(written=next_round, step=WRITTEN))._replace(
                numbers=self._put(state.numbers, index, next_round))

    def _collect(self, state: State, index: int, rank: Rank) -> Iterator[State]:
        """Of a complete call, reduce the own slice, then take the result. At the end, the background thread does so."""
        if not self._is_complete(state, rank) or not (rank.is_here or rank.is_closed):
            return
        place = rank.written % self._places
        if any(row[place] != rank.written for row in state.values):
            raise Broken(f"rank {index} reads values of another round than {rank.written}: {state.values}")
        if rank.step == WRITTEN:
            yield state.with_rank(index, rank._replace(step=REDUCED))._replace(
                slices=self._put(state.slices, index, rank.written))
        elif rank.step == REDUCED:
            if any(row[place] > rank.written for row in state.slices):
                raise Broken(f"rank {index} takes a slice of a later round than {rank.written}: {state.slices}")
            yield state.with_rank(index, rank._replace(done=rank.written, step=IDLE), "done")

    def _interrupt(self, state: State, index: int, rank: Rank) -> Iterator[State]:
        if self._interrupts and rank.is_here and rank.written > rank.done and not rank.is_closed:
            yield state.with_rank(index, rank._replace(is_here=False))

    def _finish(self, state: State, index: int, rank: Rank) -> Iterator[State]:
        """Follow the decisions. A thread between values and number holds the lock."""
        if state.end == FREEZING and not rank.is_frozen and rank.step != VALUES_WRITTEN:
            yield state.with_rank(index, rank._replace(is_frozen=True))
        if state.end == CLOSING and not rank.is_closed and rank.step != VALUES_WRITTEN:
            closed = rank._replace(is_closed=True, is_frozen=True)
            if rank.written > rank.done and not self._is_complete(state, rank):
                yield state.with_rank(index, closed._replace(done=rank.written, step=IDLE), "request")
            else:
                yield state.with_rank(index, closed)

    def _is_complete(self, state: State, rank: Rank) -> bool:
        place = rank.written % self._places
        return rank.written > rank.done and all(row[place] == rank.written for row in state.numbers)

    def _put(self, places: Places, index: int, number: int) -> Places:
        return _set(places, index, _set(places[index], number % self._places, number))

    def _check_end(self, state: State) -> None:
        outcomes: dict[int, set[str]] = {}
        for _, number, outcome in state.outcomes:
            outcomes.setdefault(number, set()).add(outcome)
        if any(len(each) > 1 for each in outcomes.values()):
            raise Broken(f"ranks disagree: {sorted(state.outcomes)}")
        if any(rank.written != rank.done for rank in state.ranks):
            raise Broken(f"a call is left behind: {state.ranks}")


# docs/protocol.md#areas
@pytest.mark.parametrize(("ranks", "rounds", "interrupts"), [(2, 5, True), (3, 2, True), (3, 4, False)])
def test_in_all_interleavings_ranks_agree_and_read_values_of_their_round(ranks: int, rounds: int, interrupts: bool) -> None:
    model = Model(ranks, rounds, interrupts=interrupts)
    model.explore()
    assert model.states > 2_000, "hardly anything was explored"


def test_one_place_for_all_rounds_is_too_few() -> None:
    with pytest.raises(Broken):
        Model(2, 2, places=1).explore()


def test_an_end_that_does_not_wait_for_all_to_freeze_divides_them() -> None:
    with pytest.raises(Broken, match="ranks disagree"):
        Model(2, 2, freezes=False).explore()


# --- the order of accesses -----------------------------------------------------------------------------------------------

FENCE = [Event("lock", "fence"), Event("unlock", "fence")]
ROUNDS = 3
"""The third one overwrites what was written in the first."""
WHAT = ("values", "text")
BEFORE_NUMBER, AFTER_NUMBERS = "before the number", "after all numbers"
EVERYWHERE = frozenset({BEFORE_NUMBER, AFTER_NUMBERS})


def calls(rank: int, size: int, fences: frozenset[str], *, waits: bool = True) -> Program:
    """Return what a rank does in some calls.

    Args:
        waits: whether a rank takes its result, and so waits for all to have begun a call, before it makes the next one.
    """
    program: Program = []
    others = [other for other in range(size) if other != rank]
    for number in range(1, ROUNDS + 1):
        parity = number % 2
        program += [Event("write", f"{what} {rank}, {parity}", number) for what in WHAT]
        program += FENCE if BEFORE_NUMBER in fences else []
        program.append(Event("write", f"number {rank}, {parity}", number))
        if waits or number == 1:
            program += [Event("await", f"number {other}, {parity}", number) for other in others]
            program += FENCE if AFTER_NUMBERS in fences else []
            program += [Event("read", f"{what} {other}, {parity}", number) for other in others for what in WHAT]
    return program


def wakes(fences: frozenset[str]) -> list[Program]:
    """Return what a rank does that wakes another one, and what that one does: who has seen the word must see the number."""
    between = FENCE if BEFORE_NUMBER in fences else []
    after = FENCE if AFTER_NUMBERS in fences else []
    return [[Event("write", "number", 1), *between, Event("write", "word", 1)],
            [Event("await", "word", 1), *after, Event("read", "number", 1)]]


def both(fences: frozenset[str]) -> list[Program]:
    return [calls(rank, 2, fences) for rank in range(2)]


Programs = Callable[[frozenset[str]], list[Program]]


@pytest.mark.parametrize("programs", [both, wakes])
@pytest.mark.parametrize(("machine", "fences"), [(weak, EVERYWHERE), (aarch64, EVERYWHERE), (x86, frozenset())])
def test_with_fences_no_order_of_accesses_shows_a_wrong_value(programs: Programs, machine: Machine,
                                                              fences: frozenset[str]) -> None:
    """x86 needs none."""
    assert failure(programs(fences), machine) == []


@pytest.mark.parametrize("programs", [both, wakes])
@pytest.mark.parametrize("left_out", sorted(EVERYWHERE))
def test_each_fence_is_needed_where_accesses_are_reordered(programs: Programs, left_out: str) -> None:
    assert failure(programs(EVERYWHERE - {left_out}), aarch64)


def test_a_call_may_be_overwritten_only_when_all_have_begun_the_next_one() -> None:
    assert failure([calls(rank, 2, frozenset(), waits=rank != 0) for rank in range(2)], x86)


def sleeps(*, fenced: bool) -> list[Program]:
    """Return how one rank arrives and looks who sleeps, and another one goes to sleep and looks who has arrived.

    It is enough if one of the two sees the other.
    """
    fence = FENCE if fenced else []
    return [[Event("write", "number", 1), *fence, Event("read", "asleep", 1)],
            [Event("write", "asleep", 1), *fence, Event("read", "number", 1)]]


@pytest.mark.parametrize("machine", [weak, aarch64, x86])
def test_whoever_wakes_only_those_that_sleep_needs_a_fence_on_every_machine(machine: Machine) -> None:
    assert failure(sleeps(fenced=True), machine, everywhere=True) == []
    assert failure(sleeps(fenced=False), machine, everywhere=True)
