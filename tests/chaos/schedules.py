"""Random schedules of the pure protocol, in simulated time."""

from __future__ import annotations

import random

from tests.chaos.rows import Row, Trouble
from tests.membership.model import play, play_job
from tests.negotiation.trainer import TrainingJob


def membership(chance: random.Random, row: Row) -> None:
    """Play an elastic job whose processes answer late, freeze, and die."""
    row.tried += play(chance.getrandbits(40))
    row.survived += 1


def negotiation(chance: random.Random, row: Row) -> None:
    """Play a training of such a job: every rank's result is compared."""
    job = TrainingJob(chance.getrandbits(40))
    play_job(job)
    row.tried += job.steps_made
    row.survived += 1


SCHEDULES = (Trouble("events of the authority of an elastic job", membership),
             Trouble("steps of a simulated training", negotiation))
