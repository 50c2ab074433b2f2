"""Which rank owns which parameter, where optimizer state is sharded: pure arithmetic, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def assign_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return each parameter's owner; the largest first, each to the owner with the least so far.

    The largest load is at most 4/3 of the smallest possible one, where no single parameter exceeds it (Graham, "Bounds on
    multiprocessing timing anomalies", 1969). Ties go to the earlier parameter and to the lower owner.

    Args:
        sizes: bytes of each parameter.
        loads: bytes that each owner has; increased by what it gets.
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


def why_uneven(sizes: Mapping[str, int], owners: Mapping[str, int], ranks: int) -> str:
    """Return a sentence about the parameter that is larger than an equal part of all; nothing if there is none.

    Args:
        sizes: bytes of each parameter, by its name.
        owners: rank by the same names.
        ranks: how many ranks own parameters.
    """
    largest, total = max(sizes, key=lambda name: sizes[name], default=""), sum(sizes.values())
    if not total or sizes[largest] * ranks <= total:
        return ""
    return (f"sharded=True: '{largest}' is {sizes[largest] / total:.0%} of all parameters, and a parameter is owned as a "
            f"whole: rank {owners[largest]} has it, where an equal part of {ranks} ranks is {1 / ranks:.0%}")
