"""What the fuzzes have in common: many seeds in one job, which of them failed, and the command that says so.

A rank prints, with the seed, "begun", "wrong" and an error where its values are not one process's, and "fine" when it
has come to the end of a seed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tests.worlds import Ended, Processes, Program

BEGUN, FINE, WRONG = "begun", "fine", "wrong"
Tell = Callable[[str], object]


class WrongError(AssertionError):
    """Raised when ranks differ from one process."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A seed that failed.

    Attributes:
        rank: the first rank that says why.
        error: what it says.
        drawn: what was drawn.
    """

    seed: int
    size: int
    rank: int
    error: str
    drawn: str

    def __str__(self) -> str:
        return f"{self.drawn}\nseed {self.seed} failed on {self.size} ranks, on rank {self.rank}:\n{self.error}"


def failures(seeds: Sequence[int], size: int, program: Program, arguments: Sequence[object], drawn: Callable[[int], object],
             environment: Mapping[str, str], imported: Sequence[str], seconds_a_seed: float,
             tell: Tell) -> Iterator[Failure]:
    """Carry out some seeds, many in one job, and yield those that fail.

    Args:
        program: what each rank calls, with the list of seeds and these further arguments.
        drawn: what a seed draws, to be told.
        tell: gets a line a job.
    """
    rest = list(seeds)
    while rest:
        fine, ended = _job(size, rest, program, arguments, environment, imported, seconds_a_seed)
        tell(f"{fine} of {len(rest)} seeds have ended on {size} ranks, with {dict(environment)}")
        for rank in ended:
            for line in rank.stdout.splitlines():
                if line.startswith(f"{WRONG} "):
                    _, seed, error = line.split(" ", 2)
                    yield Failure(int(seed), size, rank.rank, error, str(drawn(int(seed))))
        if fine == len(rest):
            break
        first = _cause(ended)
        yield Failure(rest[fine], size, first.rank, first.stderr[-5000:], str(drawn(rest[fine])))
        rest = rest[fine + 1:]


def seeds_of(text: str) -> range:
    """Return the seeds that the command line asks for: BEGIN:END, or one."""
    begin, _, end = text.partition(":")
    return range(int(begin), int(end) if end else int(begin) + 1)


def report(count: int, found: Iterable[Failure]) -> int:
    """Print failures as they come, and how many there are of so many seeds; return what to exit with."""
    begun, number = time.monotonic(), 0
    for failure in found:
        print(failure, flush=True)
        number += 1
    print(f"{count} seeds in {time.monotonic() - begun:.0f} s: {number} failed")
    return int(number > 0)


def _job(size: int, seeds: list[int], program: Program, arguments: Sequence[object], environment: Mapping[str, str],
         imported: Sequence[str], seconds_a_seed: float) -> tuple[int, list[Ended]]:
    """Return how many of the seeds every rank has finished, and how the ranks ended."""
    with Processes(size, program, seeds, *arguments, environment=dict(environment), imported=imported) as world:
        try:
            ended = world.wait(60.0 + seconds_a_seed * len(seeds))
        except AssertionError:
            ended = [world.told(rank) for rank in range(size)]
    if all(rank.code == 0 for rank in ended):
        return len(seeds), ended
    return min(min(rank.stdout.count(f"{FINE} ") for rank in ended), len(seeds) - 1), ended


def _cause(ended: Sequence[Ended]) -> Ended:
    """Return the rank whose error is not merely what another rank told it."""
    failed = [rank for rank in ended if rank.code != 0]
    return next((rank for rank in failed if "PeerFailedError" not in rank.stderr), failed[0])
