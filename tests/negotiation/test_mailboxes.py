"""Mailboxes: whatever the schedule, each call is answered once, with the same ranks' calls on all ranks."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.core.types import Collective
from hvdlite.negotiation import mailboxes
from hvdlite.negotiation.mailboxes import MailboxTable
from hvdlite.negotiation.messages import MailboxFrozen, Request
from tests.negotiation.mailbox_ranks import Call, Job, Rank, expected


def scripts(size: int, choice: random.Random) -> list[list[Call]]:
    """Return calls under a few names, mostly blocking, sometimes not on all ranks, or of another size on one rank."""
    names, numbers = ["x", "y", "z.1", "z.2"], dict.fromkeys(["x", "y", "z.1", "z.2"], 0)
    made: list[list[Call]] = [[] for _ in range(size)]
    abandoned = choice.choice([0.1, 0.5])
    for _ in range(60):
        name = choice.choice(names)
        number, numbers[name] = numbers[name], numbers[name] + 1
        differs, other = choice.random() < 0.05, choice.randrange(size)
        for rank, script in enumerate(made):
            script.append(Call(name, number, choice.random() < 0.95, 2 if differs and rank == other else 1,
                               abandoned=choice.random() < abandoned))
    return made


# docs/protocol.md#mailboxes
@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32), st.sampled_from([1, 2, 64]))
def test_each_call_is_answered_once_and_alike_on_all_ranks(size: int, seed: int, areas: int) -> None:
    choice = random.Random(seed)
    job = Job(scripts(size, choice), choice)
    with mock.patch.object(mailboxes, "CLASSES", ((1 << 10, areas),)):
        job.play()
    for calls in zip(*(rank.script for rank in job.ranks), strict=True):
        want = expected(calls[0], size) if len({call.elements for call in calls}) == 1 else -1
        assert [call.result for call in calls] == [want] * size, calls


def test_without_a_free_area_the_mailbox_that_was_opened_first_is_given_back() -> None:
    table = MailboxTable(1 << 10)

    def call(*names: str) -> None:
        for name in names:
            request = Request(name, Collective.ALLREDUCE, "int64", (1,), blocking=True)
            table.observe(request, (0, 1), 8, 0.0, all_blocking=True)

    with mock.patch.object(mailboxes, "CLASSES", ((1 << 10, 2),)):
        call("x", "x", "y", "y", "z", "z")
        assert [mailbox.stem for mailbox in table.opened] == ["x", "y"]
        call("z", "w", "w")
        assert table.frozen == [1], "one at a time"
        for rank in (0, 1):
            table.member_frozen(rank, MailboxFrozen(1, 7), sequence=5)
        call("z", "w")
        assert table.closed == [1] and table.frozen == [1], "its area is free when all ranks have applied that"
        table.applied = lambda: 6
        call("z")
        assert [(mailbox.stem, mailbox.area, mailbox.first_round) for mailbox in table.opened[2:]] == [("z", 0, 8)]
        call("w")
        assert table.frozen == [1, 2]


# docs/protocol.md#mailboxes
def test_areas_serve_all_sets_with_equally_many_ranks_and_are_counted_by_size() -> None:
    table = MailboxTable(4 << 20)
    table.applied = lambda: 1 << 60

    def call(name: str, members: tuple[int, ...], nbytes: int, process_set: int) -> None:
        for _ in range(2):
            request = Request(name, Collective.BROADCAST, "uint8", (nbytes,), root_rank=members[0], blocking=True,
                              process_set_id=process_set)
            table.observe(request, members, nbytes, 0.0, all_blocking=True)

    large = dict(mailboxes.CLASSES)[4 << 20]
    for index in range(large):
        call(f"a{'x' * index}", (0, 1), 2 << 20, 1)
    assert len(table.opened) == large
    call("b", (1, 2), 2 << 20, 2)
    assert table.frozen == [1], "the first one gives its area, whichever the members"
    table.freeze_in(1, 0.0)  # the set is removed
    for mailbox in table.opened[:]:
        for rank in (0, 1):
            table.member_frozen(rank, MailboxFrozen(mailbox.mailbox_id, 20), sequence=5)
    call("b", (1, 2), 2 << 20, 2)
    assert table.opened[-1].stem == "b" and table.opened[-1].area < large
    for count in (3, 4, 5):
        for index in range(40):
            call(f"c{'x' * index}", tuple(range(count)), 100 << 10, 2 + count)
    assert sum(mailbox.capacity > 31 << 10 for mailbox in table.opened) <= 2 * large + dict(mailboxes.CLASSES)[512 << 10]


@pytest.mark.parametrize(("name", "stem"), [
    ("x", "x"), ("x1", "x"), ("x01", "x"), ("7", ""), (f"q{10 ** 17}", f"q{10 ** 17}")])
def test_names_have_a_stem_and_a_number_of_their_own(name: str, stem: str) -> None:
    assert mailboxes.stem_and_number(name)[0] == stem
    names = [name, f"{name}1", f"{name}01", f"{name}0"]
    assert len(set(map(mailboxes.stem_and_number, names))) == 4


# docs/protocol.md#mailboxes
@pytest.mark.parametrize("is_too_early", [False, True])
def test_an_area_is_used_again_only_when_all_ranks_have_applied_the_end_of_its_mailbox(is_too_early: bool) -> None:
    """A rank that has applied it would write round 3 over round 1, which another one has still to read.

    That rank's thread has left the call of round 1, and its next call became a request; so the other one is a round ahead.
    """
    made = [[Call("z.1", 0, True), Call("z.1", 1, True, abandoned=rank == 0), Call("z.2", 0, True, abandoned=rank == 0),
             Call("z.1", 2, True)] for rank in (0, 1)]
    job = Job(made, random.Random(1))
    slow, fast = job.ranks
    if is_too_early:
        job.coordinator.negotiator.mailboxes.applied = lambda: 1 << 60

    def exchange(*applying: Rank) -> None:
        for rank in job.ranks:
            rank.send()
            rank.receive()
        job.decide()
        for rank in applying:
            rank.apply()

    with mock.patch.multiple(mailboxes, OPENS_AFTER=1, MOST_CALLS=1):
        for rank in job.ranks:
            rank.step()
        exchange(slow, fast)
        assert all(rank.handoff.mailboxes for rank in job.ranks)
        while slow.position < 3 or slow.current is not None:
            slow.step()
        while fast.position < 3:
            fast.step()
        fast.step()  # writes round 2
        exchange(slow, fast)  # the mailbox is frozen
        exchange(fast)  # closed
        exchange(fast)  # z.2 is answered
        while fast.position < 4:
            fast.step()
        fast.step()  # writes round 3, if there is a mailbox
        try:
            job.play(20_000)
        except AssertionError:
            assert is_too_early
    assert is_too_early != all(call.result == expected(call, 2) for calls in made for call in calls)
