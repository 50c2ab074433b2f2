"""What ranks bring to the rounds of a gradient set, and interleavings, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from tests.negotiation.reducers import ACTIONS, Reducer, Round
from tests.negotiation.simulation import Simulation


@st.composite
def rounds(draw: st.DrawFn, counts: Sequence[int], names: Sequence[str]) -> list[list[Round]]:
    """Draw what each rank brings to so many rounds: mostly the same, sometimes another shape, a sparse, missing or extra
    member."""
    brought: list[list[Round]] = [[] for _ in counts]
    shapes = {name: draw(st.integers(0, 40)) for name in names}
    for number in range(max(counts)):
        event = draw(st.sampled_from(["calm"] * 6 + ["all change", "one changes", "extra on one", "one lacks", "sparse"]))
        name, odd = draw(st.sampled_from(names)), draw(st.integers(0, len(counts) - 1))
        if event == "all change":
            shapes[name] += 1
        for rank, count in enumerate(counts):
            if number >= count:
                continue
            members = dict(shapes)
            if rank == odd and event == "one changes":
                members[name] += 1
            if rank == odd and event == "extra on one":
                members["extra"] = 3
            if rank == odd and event == "one lacks" and len(members) > 1:  # a rank without any takes no part in rounds
                del members[name]
            missing = draw(st.frozensets(st.sampled_from(names), max_size=2)) & members.keys()
            sparse = {name} if event == "sparse" and draw(st.sampled_from([True, True, False])) else set()
            brought[rank].append(Round(members, missing, frozenset(sparse & members.keys() - missing)))
    return brought


def led(size: int, per_host: int, first_too: bool) -> list[range]:
    """Return the ranks of each host with a leader; that of rank 0, the coordinator, has none unless `first_too`."""
    if not per_host:
        return []
    hosts = [range(first, min(first + per_host, size)) for first in range(0, size, per_host)]
    return hosts if first_too else hosts[1:]


def worlds(draw: st.DrawFn, size: int) -> tuple[Simulation, list[int]]:
    """Draw a simulation of so many ranks, with leaders or without, and an interleaving for `run`."""
    hosts = led(size, draw(st.sampled_from([0, 1, 2, 3])), draw(st.booleans()))
    simulation = Simulation(size, draw(st.sampled_from([0, 16, 1000])), hosts=hosts, layouts=draw(st.sampled_from([1, 64])),
                            mailboxes=not hosts and draw(st.booleans()))
    return simulation, draw(st.lists(st.integers(0, size * ACTIONS - 1), max_size=150))


@st.composite
def stories(draw: st.DrawFn, *, joins: bool) -> tuple[Simulation, list[Reducer], list[int]]:
    """Draw a simulation, its reducers and an interleaving.

    Args:
        joins: whether ranks play different numbers of rounds, then join, and all of that again.
    """
    size = draw(st.integers(1, 4))
    simulation, schedule = worlds(draw, size)
    names = [f"t{index}" for index in range(draw(st.integers(1, 6)))]
    epochs = []
    for _ in range(draw(st.integers(1, 3)) if joins else 1):
        few = st.lists(st.integers(0, 7), min_size=size, max_size=size)
        counts = draw(few) if joins else [draw(st.integers(3, 9))] * size
        epochs.append(draw(rounds(counts, names)))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    return simulation, [Reducer(simulation, rank, epochs[0][rank], rng, joins=joins,
                                later=[epoch[rank] for epoch in epochs[1:]]) for rank in range(size)], schedule
