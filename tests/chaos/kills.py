"""Processes that are killed or stopped at random moments: ranks of plain jobs, members and hosts of elastic jobs."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

from tests.chaos.rows import Row, Trouble
from tests.elastic.campaign import one, two_hosts
from tests.runner.kills import kill_a_rank
from tests.runner.networks import unavailable


def rank(chance: random.Random, row: Row) -> None:
    """Kill a rank while the ranks start, meet or train: the job ends, names it, and leaves nothing."""
    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as name:
        row.tried += 1
        kill_a_rank(chance, Path(name))
        row.refused += 1


def members(chance: random.Random, row: Row, *, several_hosts: bool) -> None:
    """Kill and stop members of an elastic job, cut its network: it trains to its end, and replicas agree."""
    seed = chance.getrandbits(30)
    if several_hosts:
        with two_hosts() as hosts:
            lost, problem = one(seed, hosts)
    else:
        lost, problem = one(seed)
    row.tried += lost
    if problem:
        row.wrong.append(problem)
    else:
        row.survived += 1


KILLS = (
    Trouble("ranks killed in plain jobs", rank, 3),
    Trouble("members killed on one host", functools.partial(members, several_hosts=False), 4),
    Trouble("members, agents and cables of two hosts", functools.partial(members, several_hosts=True), 4, unavailable),
)
