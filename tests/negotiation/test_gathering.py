"""What some ranks have reported is gathered until all that take part have reported it."""

from __future__ import annotations

import itertools

from hypothesis import given, settings, strategies

from hvdlite.negotiation.gathering import Gathering, Ranks


def gathering(scope: Ranks = (0, 1, 2, 3), joined: dict[int, None] | None = None) -> Gathering[str, str]:
    """Return a gathering of texts for which all ranks are awaited that have not joined."""
    joined = {} if joined is None else joined
    return Gathering(lambda item, ranks: [rank for rank in ranks if rank not in joined], scope, joined)


def test_the_last_rank_completes_a_thing_and_its_key_is_free_again() -> None:
    table = gathering()
    for ranks in ((2,), (0, 1)):
        assert table.add(ranks, "a", f"of {ranks}", 5.0).missing
        table.check_invariants()
    assert table.missing_ranks(table["a"]) == [3]
    complete = table.add((3,), "a", "last", 6.0)
    assert not complete.missing and "a" not in table
    assert complete.parts == [((2,), "of (2,)"), ((0, 1), "of (0, 1)"), ((3,), "last")]
    assert complete.ranks == {0, 1, 2, 3} and complete.since == 5.0 and complete.first == "of (2,)"
    assert table.add((1,), "a", "anew", 7.0).since == 7.0


def test_a_repetition_is_marked_and_counts_for_nobody_else() -> None:
    table = gathering()
    assert not table.add((0, 1), "a", "x").is_repeated
    repeated = table.add((1, 2), "a", "x")
    assert repeated.is_repeated and table.missing_ranks(repeated) == [3]
    table.check_invariants()


def test_a_rank_that_has_joined_is_not_awaited_and_may_report_all_the_same() -> None:
    joined: dict[int, None] = {}
    table = gathering(joined=joined)
    table.add((0,), "first", "x")
    table.add((0, 1, 2), "second", "x")
    assert [each.first for each in table.join(3)] == ["x"] and list(table) == ["first"]
    joined[3] = None
    assert table.add((3,), "first", "late").missing == 2
    table.check_invariants()
    assert table.add((1,), "third", "x").missing == 2
    assert table.join(1) == [] and table["third"].missing == 2, "it had reported this one"
    joined[1] = None
    table.check_invariants()
    joined.clear()
    table.recount()
    assert table.missing_ranks(table["first"]) == [1, 2] and table.missing_ranks(table["third"]) == [0, 2, 3]
    table.check_invariants()


def test_what_is_opened_passes_until_it_is_complete() -> None:
    table = gathering()
    table.add((0,), "a", "x")
    table.add((1,), "b", "y")
    (opened,) = table.open(lambda item: item == "x")
    assert opened.parts == [((0,), "x")] and not table.open(lambda item: item == "x")
    assert table.add((1, 2), "a", "x").passes and not table["b"].passes
    assert [each.first for each in table.open()] == ["y"]
    last = table.add((3,), "a", "x")
    assert last.passes and not last.missing and list(table) == ["b"]
    assert not table.add((0,), "a", "x").passes


def test_some_things_are_taken_and_the_others_stay() -> None:
    table = gathering()
    for name in "abc":
        table.add((0,), name, name)
    assert [each.first for each in table.take_if(lambda item: item != "b")] == ["a", "c"]
    assert list(table) == ["b"]


@given(strategies.permutations(range(6)), strategies.lists(strategies.integers(1, 5), max_size=5))
@settings(deadline=None)
def test_parts_of_any_size_in_any_order_make_one_whole(ranks: list[int], cuts: list[int]) -> None:
    table = gathering(tuple(range(6)))
    bounds = [0, *sorted(set(cuts)), 6]
    for begin, end in itertools.pairwise(bounds):
        gathered = table.add(tuple(ranks[begin:end]), "a", "x")
        assert gathered.missing == 6 - end and not gathered.is_repeated
        table.check_invariants()
    assert not table and gathered.ranks == set(range(6))
