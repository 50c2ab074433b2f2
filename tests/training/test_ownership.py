"""Who owns which parameter, where optimizer state is sharded."""

from __future__ import annotations

import pytest

from hvdlite.training.ownership import assign_owners, why_uneven


def test_the_largest_come_first_and_ties_go_to_the_lower_owner() -> None:
    loads = [0, 5]
    assert assign_owners([3, 9, 4, 3], loads) == [0, 0, 1, 1]
    assert loads == [12, 12]


@pytest.mark.parametrize(("sizes", "told"), [
    ([4, 2, 2], ""),
    ([], ""),
    ([0, 0], ""),
    ([5, 2, 2], "sharded=True: 'p0' is 56% of all parameters, and a parameter is owned as a whole: rank 7 has it, where an "
                "equal part of 2 ranks is 50%"),
])
def test_a_parameter_that_is_larger_than_an_equal_part_is_named(sizes: list[int], told: str) -> None:
    named = {f"p{index}": size for index, size in enumerate(sizes)}
    assert why_uneven(named, dict.fromkeys(named, 7), 2) == told
