"""Ranks that are asked to stop."""

from __future__ import annotations

import random
import signal
import time

import numpy as np

from hvdlite import api, ops
from hvdlite.boundaries import stop_requested


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
