"""An elastic training whose every step can be checked: weights are integers, and a history says how they came about.

Arguments: a folder for what the members tell, and the number of steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from hvdlite import api, ops
from hvdlite.training import elastic
from hvdlite.training.elastic_state import ObjectState

COUNT = 4096
"""Weights."""
COMMIT_EVERY = 5


def replayed(history: list[tuple[int, int]]) -> np.ndarray:
    """Return the weights after these (step, ranks)."""
    weights = np.zeros(COUNT, np.int64)
    for step, ranks in history:
        weights += ranks * (step + np.arange(COUNT))
    return weights


def main(folder: Path, steps: int) -> None:
    """Train, and tell."""
    api.init()
    member = os.environ.get("HVDLITE_MEMBER", "none")
    (folder / f"started.{member}.{os.getpid()}").touch()
    trouble = os.environ.get("TROUBLE", "")  # MEMBER:STEP:KIND
    state = ObjectState(step=0, weights=np.zeros(COUNT, np.int64), history=[])

    @elastic.run
    def train(state: ObjectState) -> str:
        while state.step < steps:
            (folder / f"at.{member}").write_text(str(state.step), encoding="ascii")
            if trouble == f"{member}:{state.step}:raise":
                raise RuntimeError("trouble ahead")
            if trouble == f"{member}:{state.step}:exit":
                os._exit(0)
            state.weights += ops.allreduce(state.step + np.arange(COUNT), op=api.Sum)
            state.history.append((state.step, api.size()))
            state.step += 1
            time.sleep(0.002)
            if state.step % COMMIT_EVERY == 0:
                state.commit()
        return hashlib.sha256(state.weights.tobytes()).hexdigest()

    digest = train(state)
    told = {"pid": os.getpid(), "rank": api.rank(), "size": api.size(), "digest": digest, "history": state.history,
            "right": bool(np.array_equal(state.weights, replayed(state.history)))}
    (folder / f"ended.{member}").write_text(json.dumps(told), encoding="ascii")
    api.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
