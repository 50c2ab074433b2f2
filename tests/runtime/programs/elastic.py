"""Members of elastic jobs that train with numpy."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite import api, ops
from hvdlite.training.elastic import run
from hvdlite.training.elastic_state import ObjectState


def descriptors() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def shared_mappings() -> int:
    """Return how many mappings of shared memory this process has."""
    return Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:hvdlite")


def train(gate: str, elements: int = 1000, every: int = 1) -> dict[str, Any]:
    """Train until the file `gate` exists; each step adds to the weights what tells the size of its world.

    Args:
        elements: of the weights.
        every: steps between two commits.
    """
    api.init()
    state: Any = ObjectState(weights=np.zeros(elements), step=0, sizes=[])
    worlds: list[tuple[int, int]] = []
    held: list[tuple[int, int]] = []

    @run
    def loop(state: Any) -> str:
        worlds.append((api.rank(), api.size()))
        print(f"world of {api.size()} as {api.rank()} at {state.step}", flush=True)
        while True:
            done = os.path.exists(gate)
            gradient = np.full(elements, 1.0 + api.rank())
            gradient[-1] = done
            gradient = ops.allreduce(gradient, op=api.Sum, name="gradient")
            state.weights = state.weights + gradient
            state.sizes = [*state.sizes, api.size()]
            state.step += 1
            print(f"step {state.step} of {len(worlds)}", flush=True)
            if state.step % 10 == 0:
                held.append((descriptors(), shared_mappings()))
            if gradient[-1]:
                return "done"
            if state.step % every == 0:
                state.commit()

    assert loop(state) == "done"
    expected = float(sum(size * (size + 1) // 2 for size in state.sizes))
    assert state.weights[0] == expected, (state.weights[0], expected, state.sizes)
    total = float(ops.allreduce(np.ones(1), op=api.Sum, name="afterwards")[0])
    assert total == api.size()
    api.shutdown()
    return {"worlds": worlds, "pid": os.getpid(), "digest": hashlib.sha256(state.weights.tobytes()).hexdigest(),
            "steps": state.step, "held": held, "environment": (int(os.environ["HOROVOD_RANK"]), int(os.environ["HVDLITE_SIZE"]))}
