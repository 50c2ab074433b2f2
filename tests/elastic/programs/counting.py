"""An elastic training whose every step can be checked: weights are integers, and a history says how they came about.

Arguments: a folder for what the members tell, and the least number of steps. Environment:

- TROUBLE=MEMBER:STEP:KIND: what happens at a step of a member; see `_make_trouble`.
- UNTIL=NAME: training goes on until this file is in the folder.
- BODIES=1: the loop counts bodies, and commits every five of them.
- HOLD=STEP: members that make no trouble wait for this file before a step.
- CHECKPOINTS=FOLDER: the state has durable checkpoints there.
- WAITS=1: nobody ever calls elastic.run.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hvdlite import api, ops
from hvdlite.training import elastic
from hvdlite.training.elastic.state import ObjectState

COUNT = 4096
"""Weights."""
COMMIT_EVERY = 5
STEPS_AFTER = 50
"""Steps that follow the one at which the file UNTIL was seen, so that what happens then happens in training."""


def replayed(history: list[tuple[int, int]]) -> np.ndarray:
    """Return the weights after these (step, ranks)."""
    weights = np.zeros(COUNT, np.int64)
    for step, ranks in history:
        weights += ranks * (step + np.arange(COUNT))
    return weights


def adapt() -> None:
    """Adapt to a new world: a reset callback, in which failpoints can be."""


def main(folder: Path, steps: int) -> None:
    """Train, and tell."""
    api.init()
    member = os.environ.get("HVDLITE_MEMBER", "none")
    (folder / f"started.{member}.{os.getpid()}.{os.environ.get('HOROVOD_HOSTNAME', '')}").touch()
    trouble = os.environ.get("TROUBLE", "")
    counts_bodies = os.environ.get("BODIES") == "1"
    until, hold = os.environ.get("UNTIL", ""), int(os.environ.get("HOLD", "-1"))
    state = ObjectState(step=0, weights=np.zeros(COUNT, np.int64), history=[], end=0 if until else steps)
    state.register_reset_callbacks([lambda: adapt()])

    if os.environ.get("CHECKPOINTS"):
        state.checkpoint(os.environ["CHECKPOINTS"], every="1 h")

    @elastic.run
    def train(state: ObjectState) -> str:
        own = np.frombuffer(hashlib.sha256(state.weights.tobytes()).digest(), np.uint8)
        if len(np.unique(ops.allgather(own[None]), axis=0)) > 1:
            raise RuntimeError(f"replicas differ at step {state.step} in a world of {api.size()} ranks")
        while not state.end or state.step < state.end:
            if counts_bodies:
                state._begin_body()
            (folder / f"at.{member}").write_text(str(state.step), encoding="ascii")
            if trouble.startswith(f"{member}:{state.step}:"):
                _make_trouble(trouble.rpartition(":")[2], folder)
            while state.step == hold and not trouble.startswith(f"{member}:") and not (folder / until).exists():
                time.sleep(0.005)
            seen = int(not state.end and (folder / until).exists())  # all members decide alike
            total = ops.allreduce(np.append(state.step + np.arange(COUNT), seen), op=api.Sum)
            state.weights += total[:-1]
            if total[-1]:
                state.end = max(steps, state.step + STEPS_AFTER)
            state.history.append((state.step, api.size()))
            state.step += 1
            time.sleep(0.002)
            if state.step % COMMIT_EVERY == 0:
                state.commit()
        if counts_bodies:
            state._end_bodies()
        return hashlib.sha256(state.weights.tobytes()).hexdigest()

    if os.environ.get("WAITS"):
        signal.pause()
    digest = train(state)
    told = {"pid": os.getpid(), "rank": api.rank(), "size": api.size(), "digest": digest, "history": state.history,
            "right": bool(np.array_equal(state.weights, replayed(state.history)))}
    (folder / f"ended.{member}").write_text(json.dumps(told), encoding="ascii")
    api.shutdown()


def _make_trouble(kind: str, folder: Path) -> None:
    """Let failpoints act; then raise, exit with code 0, die, or let discovery find what is in the file "next"."""
    (folder / "armed").touch()
    if kind == "raise":
        raise RuntimeError("trouble ahead")
    if kind == "exit":
        os._exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "grow" and (folder / "next").exists():  # a step may be repeated
        (folder / "next").rename(folder / "hosts")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
