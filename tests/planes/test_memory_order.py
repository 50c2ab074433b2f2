"""A model of the shm barrier on machines that reorder memory accesses: every order in which accesses may take effect.

Each rank is a program: a list of accesses to shared memory and of operations in the kernel. The explorer executes the
programs of all ranks in every interleaving and, within a program, in every order that the machine may choose. There is one
memory: all ranks see a store when it takes effect, as on x86 and on aarch64. A read that finds another value than the
algorithm needs is a failure. The barrier's part of a program is recorded from `Barrier` itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.memory.shared import REGIONS
from hvdlite.planes.shm_barrier import Barrier, one_by_one


@dataclasses.dataclass(frozen=True)
class Event:
    """One step of a program.

    Attributes:
        kind: "write", "read" (which must find `value`) and "await" (which waits for it) access memory; "lock" and "unlock"
            are the two halves of a system call on a kernel object; "send" and "receive" are those of a message.
        where: a location, a kernel object, or a message.
    """

    kind: str
    where: str
    value: int = 0

    @property
    def is_access(self) -> bool:
        return self.kind in ("write", "read", "await")


Program = list[Event]
Machine = Callable[[Event, Event], bool]
"""Whether a machine lets the second of two events of a program take effect only after the first."""


def weak(first: Event, second: Event) -> bool:
    """Nothing but what locks and messages guarantee, one way each, and the order of accesses to one location.

    "Memory operations issued after the ACQUIRE will be completed after the ACQUIRE operation has completed", those before a
    RELEASE before it (Linux, Documentation/memory-barriers.txt). That is all: what is outside may move into the middle.
    """
    if first.is_access and second.is_access:
        return first.where == second.where
    return first.kind in ("lock", "receive") or second.kind in ("unlock", "send")


def aarch64(first: Event, second: Event) -> bool:
    """Like `weak`; but no processor shows a store before it knows that it will be executed at all."""
    return weak(first, second) or (first.kind == "await" and second.kind not in ("read", "await"))


def x86(first: Event, second: Event) -> bool:
    """Only a load may overtake a store, and no locked instruction (Intel's manual, volume 3, "Memory ordering")."""
    return weak(first, second) or second.kind == "lock" or not (first.kind == "write" and second.kind in ("read", "await"))


def failure(programs: Sequence[Program], machine: Machine, *, everywhere: bool = False) -> list[str]:
    """Return an execution in which a read finds a wrong value, as its events in the order in which they took effect; or [].

    `everywhere` asks for one in which every rank finds a wrong value.

    Only whole executions count: an order of events after which a program cannot come to its end was none.
    """
    needs = [[sum(1 << i for i in range(j) if machine(program[i], program[j])) for j in range(len(program))]
             for program in programs]
    names = sorted({event.where for program in programs for event in program})
    numbers = {name: number for number, name in enumerate(names)}
    everything = tuple((1 << len(program)) - 1 for program in programs)
    # A state: which events of each program have taken effect, what is in every location (of a lock: 1 while it is held), and
    # which ranks' reads have found a wrong value. With each goes its story, a linked list.
    begin = ((0,) * len(programs), (0,) * len(names), 0)
    seen, stack, ends = {begin}, [(begin, ())], False
    while stack:
        (done, memory, wrong), story = stack.pop()
        if done == everything:
            if wrong == (1 << len(programs)) - 1 if everywhere else wrong:
                return _told(story)
            ends = True
        for rank, program in enumerate(programs):
            low = (~done[rank] & (done[rank] + 1)).bit_length() - 1  # the first that has not taken effect
            for index in range(low, len(program)):
                if done[rank] >> index & 1 or needs[rank][index] & ~done[rank]:
                    continue
                event = program[index]
                number, value = numbers[event.where], memory[numbers[event.where]]
                if (event.kind == "lock" and value) or (event.kind in ("await", "receive") and value < event.value):
                    continue
                new = {"write": event.value, "send": event.value, "lock": 1, "unlock": 0}.get(event.kind, value)
                state = ((*done[:rank], done[rank] | 1 << index, *done[rank + 1:]),
                         (*memory[:number], new, *memory[number + 1:]),
                         wrong | (event.kind == "read" and value != event.value) << rank)
                if state not in seen:
                    seen.add(state)
                    stack.append((state, (story, f"{rank}: {event.kind} {event.where} {new}")))
    assert ends, "the programs never come to their ends"
    return []


def _told(story: Any) -> list[str]:
    told: list[str] = []
    while story:
        story, last = story
        told.append(last)
    return told[::-1]


class Recorder:
    """What a `Barrier` sees of shared memory and of the kernel, written down; it never waits.

    Args:
        looks: whether the first look at the counters is of interest, instead of the wait: it reads them.
    """

    def __init__(self, rank: int, size: int, *, fenced: bool, looks: bool = False) -> None:
        self.program: Program = []
        self._rank, self._size, self._looks = rank, size, looks
        self.fence = (lambda: self.operate("fence")) if fenced else None
        self.flush = lambda: self.operate("fence" if fenced else f"flush{rank}")
        self.arrivals: Any = self
        self.barrier = Barrier(rank, tuple(range(size)), self,
                               one_by_one(lambda other: self.operate(f"bell{other}")))
        self._waits = False
        self._due = 0  # how often this rank has come

    def write(self, where: str, value: int) -> None:
        self.program.append(Event("write", where, value))

    def read(self, where: str, value: int) -> None:
        self.program.append(Event("read", where, value))

    def operate(self, where: str) -> None:
        self.program += [Event("lock", where), Event("unlock", where)]

    def meet(self) -> None:
        def wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
            self._waits = True
            assert predicate()
            self._waits = False

        self.barrier(wait_until)

    def __setitem__(self, index: int, count: int) -> None:
        self._due = count
        self.write(f"counter{index}", count)

    def tolist(self) -> list[int]:
        """Return the counters, as if somebody else were the last."""
        count = self._due
        if self._looks and not self._waits:
            self.program += [Event("read", f"counter{index}", count) for index in range(self._size) if index != self._rank]
        elif self._waits and not self._looks:
            self.program += [Event("await", f"counter{index}", count) for index in range(self._size)]
        return [count if self._waits else count - 1] * self._size


Use = Callable[[Recorder, int, int], None]
"""What one rank of so many does."""


def slices(run: Recorder, rank: int, size: int, regions: int = REGIONS) -> None:
    """Reduce, publish the next piece, collect: until a region is written again, with terms where results were.

    Within a piece, terms and results have different places in the slot; slices of a shorter piece lie elsewhere.
    """
    others = [other for other in range(size) if other != rank]

    def terms(owner: int, piece: int) -> str:
        return f"slot{owner}.{piece % regions}.{piece // regions % 2}"

    def result(owner: int, piece: int) -> str:
        return f"slot{owner}.{piece % regions}.{(piece // regions + 1) % 2}"

    run.write(terms(rank, 1), 1)
    run.meet()
    for piece in range(1, regions + 2):
        for other in others:
            run.read(terms(other, piece), 2 * piece - 1)
        run.write(result(rank, piece), 2 * piece)
        if piece <= regions:
            run.write(terms(rank, piece + 1), 2 * piece + 1)
        run.meet()
        for other in others:
            run.read(result(other, piece), 2 * piece)


def slices_with_two_regions(run: Recorder, rank: int, size: int) -> None:
    slices(run, rank, size, regions=2)


def small_pieces(run: Recorder, rank: int, size: int) -> None:
    """Publish whole, and let everybody reduce everything: one barrier a piece."""
    for piece in range(1, REGIONS + 2):
        run.write(f"terms{rank}.{piece % REGIONS}", piece)
        run.meet()
        for other in range(size):
            run.read(f"terms{other}.{piece % REGIONS}", piece)


def bucket(run: Recorder, rank: int, size: int) -> None:
    """Two rounds of a learned bucket: the decision, which comes over a socket, is the first barrier."""
    for round_ in (1, 2):
        gradient, result = 2 * round_ - 1, 2 * round_
        for owner in range(size):
            run.write(f"place{rank}.{owner}", gradient)
        if rank == 0:
            run.program += [Event("receive", f"report{other}", round_) for other in range(1, size)]
            run.program += [Event("send", f"decision{other}", round_) for other in range(1, size)]
        else:
            run.program += [Event("send", f"report{rank}", round_), Event("receive", f"decision{rank}", round_)]
        for place in range(size):
            run.read(f"place{place}.{rank}", gradient)
        for place in range(size):
            run.write(f"place{place}.{rank}", result)
        run.meet()
        for owner in range(size):
            run.read(f"place{rank}.{owner}", result)


def look(run: Recorder, rank: int, size: int) -> None:
    """One barrier, up to the look at the counters that tells whether this rank is the last."""
    run.meet()


def programs(use: Use, size: int, *, fenced: bool, looks: bool = False) -> list[Program]:
    recorders = [Recorder(rank, size, fenced=fenced, looks=looks) for rank in range(size)]
    for rank, recorder in enumerate(recorders):
        use(recorder, rank, size)
    return [recorder.program for recorder in recorders]


def without_fence(program: Program, remainder: int) -> Program:
    """Leave out a fence of each barrier: 0: before its counter is written, 1: the flush, 2: after the counters are seen."""
    kept, count = [], 0
    for event in program:
        count += event == Event("lock", "fence")
        if event.where != "fence" or (count - 1) % 3 != remainder:
            kept.append(event)
    return kept


USES = pytest.mark.parametrize("use", [slices, small_pieces, bucket])


@USES
# docs/protocol.md#memory-order
def test_with_fences_no_order_of_accesses_shows_a_wrong_value(use: Use) -> None:
    assert failure(programs(use, 2, fenced=True), weak) == []


def test_with_fences_three_ranks_agree() -> None:
    def once(run: Recorder, rank: int, size: int) -> None:
        run.write(f"terms{rank}", 1)
        run.meet()
        for other in range(size):
            run.read(f"terms{other}", 1)

    assert failure(programs(once, 3, fenced=True), weak) == []


def test_two_regions_are_too_few() -> None:
    """The next piece would overwrite results that others still read."""
    assert failure(programs(slices_with_two_regions, 2, fenced=False), x86)


@USES
def test_counters_and_each_ranks_own_system_call_fail_where_stores_are_reordered(use: Use) -> None:
    assert failure(programs(use, 2, fenced=False), aarch64)


@USES
def test_counters_alone_hold_on_x86(use: Use) -> None:
    assert failure(programs(use, 2, fenced=False), x86) == []


@USES
@pytest.mark.parametrize("left_out", [0, 2])
def test_the_fence_is_needed_on_both_sides(use: Use, left_out: int) -> None:
    both = programs(use, 2, fenced=True)
    assert failure([without_fence(program, left_out) for program in both], aarch64)


def test_a_lock_of_each_ranks_own_is_no_fence() -> None:
    """Order comes from two ranks' calls on one kernel object; that a rank has made some system call means nothing."""
    own = [[dataclasses.replace(event, where=f"fence{rank}") if event.where == "fence" else event for event in program]
           for rank, program in enumerate(programs(slices, 2, fenced=True))]
    assert failure(own, aarch64)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("machine", "fenced"), [(weak, True), (aarch64, True), (x86, False)])
def test_some_rank_always_sees_that_it_is_the_last(machine: Machine, fenced: bool, size: int) -> None:
    """Only that one wakes the others."""
    assert failure(programs(look, size, fenced=fenced, looks=True), machine, everywhere=True) == []


def test_without_a_flush_nobody_may_see_that_it_is_the_last() -> None:
    with_flush = programs(look, 2, fenced=False, looks=True)
    without = [[event for event in program if not event.where.startswith("flush")] for program in with_flush]
    assert failure(without, x86, everywhere=True)


def test_where_stores_are_reordered_the_flush_is_the_hosts_fence() -> None:
    assert failure(programs(look, 2, fenced=False, looks=True), aarch64, everywhere=True)


def test_only_the_last_to_arrive_rings() -> None:
    class Counters:
        arrivals = np.zeros(4, np.int64)
        fence = None

        def flush(self) -> None:
            pass

    counters = Counters()
    rung: list[tuple[int, int]] = []
    barriers = [Barrier(rank, (0, 1, 2, 3), counters,
                        one_by_one(lambda other, rank=rank: rung.append((rank, other))))  # type: ignore[misc]
                for rank in range(4)]
    for rank in (2, 0, 3, 1):
        barriers[rank](lambda predicate, **poll_interval: None)
    assert rung == [(1, 0), (1, 2), (1, 3)]
