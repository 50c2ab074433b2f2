"""Ranks that are asked to stop."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import numpy as np

from hvdlite import api, ops
from hvdlite.boundaries import stop_requested
from hvdlite.training.elastic import run
from hvdlite.training.elastic.state import ObjectState


def main() -> None:
    """The same in `hvd.elastic.run`, as a script: rank 0 warns its launcher, as a scheduler does."""
    api.init()

    @run
    def train(state: ObjectState) -> int:
        while not stop_requested():
            ops.allreduce(np.ones(1), name="step")
            state.commit()
            if next(steps) == 20 and api.rank() == 0:
                os.kill(os.getppid(), signal.SIGTERM)
        return next(steps)

    steps = itertools.count()
    print("stopped at", train(ObjectState()), flush=True)


def until_stopped(every: int) -> tuple[int, int]:
    """Train until the stop; return the step, and how often the script's own handler ran.

    Args:
        every: steps between two collectives, between which ranks drift apart.
    """
    api.init()
    handled: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    generator = random.Random(api.rank())
    step = 0
    while not stop_requested():
        step += 1
        if step % every == 0:
            ops.allreduce(np.ones(1), name="step")
        time.sleep(generator.random() * 0.004)
        if step == 20:
            print("trains", flush=True)
    assert stop_requested(), "it stays true"
    api.shutdown()
    return step, len(handled)


if __name__ == "__main__":
    main()
