"""What the fuzzes have in common: many seeds in one job, and which of them the ranks came to the end of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.worlds import Ended, Processes


def job(size: int, seeds: Sequence[int], source: str, environment: Mapping[str, str], imported: Sequence[str],
        seconds_a_seed: float) -> tuple[int, list[Ended]]:
    """Return how many of the seeds every rank has finished, and how the ranks ended.

    Args:
        source: of each rank; it prints a line that begins with "fine" after each seed.
    """
    with Processes(size, source, environment=dict(environment), imported=imported) as world:
        try:
            ended = world.wait(60.0 + seconds_a_seed * len(seeds))
        except AssertionError:
            ended = [world._ended(rank) for rank in range(size)]
    if all(rank.code == 0 for rank in ended):
        return len(seeds), ended
    return min(min(rank.stdout.count("fine ") for rank in ended), len(seeds) - 1), ended


def cause(ended: Sequence[Ended]) -> Ended:
    """Return the rank whose error is not merely what another rank told it."""
    failed = [rank for rank in ended if rank.code != 0]
    return next((rank for rank in failed if "PeerFailedError" not in rank.stderr), failed[0])
