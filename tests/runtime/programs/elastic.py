"""Members of elastic jobs that train with numpy."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite import api, ops
from hvdlite.core.errors import HorovodInternalError, LaunchError, UnsupportedError
from hvdlite.core.process_set import ProcessSet
from hvdlite.training.elastic import run
from hvdlite.training.elastic.state import ObjectState
from tests.held import open_files


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
            "steps": state.step,
            "environment": (int(os.environ["HOROVOD_RANK"]), int(os.environ["HVDLITE_SIZE"]))}


def change(count: int, counts_bodies: bool) -> dict[str, Any]:
    """Pass through `count` more worlds with the same members; return what is held in the second and in the last one."""
    api.init()
    state: Any = ObjectState(step=0)
    held: list[tuple[dict[str, int], int, list[str]]] = []

    class Follower:
        """Counts what it is told."""

        began = ended = 0

        def world_began(self, runtime: object) -> None:
            assert runtime is api.runtime()
            self.began += 1

        def world_ended(self) -> None:
            self.ended += 1

    follower = Follower()
    api.follow(follower)

    @run
    def loop(state: Any) -> None:
        for _ in range(3):
            if counts_bodies:
                state._begin_body()
            ops.allreduce(np.ones(100_000), op=api.Sum)
            state.step += 1
            if not counts_bodies:
                state.commit()
        if counts_bodies:
            state._end_bodies()
        held.append((open_files(), shared_mappings(), sorted(thread.name for thread in threading.enumerate())))
        ops.barrier()  # the end of the world reaches some ranks in it
        if len(held) <= count:
            raise HorovodInternalError("a collective has failed")

    loop(state)
    assert state.step == 3 * (count + 1), state.step
    assert follower.began == count and follower.ended >= count, (follower.began, follower.ended)
    return {"early": held[1], "late": held[-1], "sequence": _twice(state), "nested": _nested(state)}


def train_twice(gate: str) -> list[tuple[int, int]]:
    """Run two trainings, the second one until the file `gate` exists; return ranks and sizes in the worlds of each."""
    api.init()
    worlds: list[tuple[int, int]] = []

    @run
    def first(state: Any) -> None:
        worlds.append((api.rank(), api.size()))
        while state.step < 5:
            ops.allreduce(np.ones(10), op=api.Sum)
            state.step += 1
            state.commit()

    @run
    def second(state: Any) -> float:
        worlds.append((api.rank(), api.size()))
        while not ops.allreduce(np.array(float(os.path.exists(gate))), op=api.Max):
            state.total += int(ops.allreduce(np.array(1), op=api.Sum)) - api.size()
            state.commit()
            print(f"second in {api.size()}", flush=True)
        return float(state.total)

    first(ObjectState(step=0))
    assert second(ObjectState(total=7)) == 7
    api.shutdown()
    return worlds


def join_early(gate: str) -> tuple[list[tuple[int, int]], int]:
    """Train until the file `gate` exists, in a world of two without rank 0, which joins after three steps.

    Returns:
        step and size at the beginning of each world, and the last step.
    """
    api.init()
    worlds: list[tuple[int, int]] = []

    @run
    def loop(state: Any) -> None:
        worlds.append((state.step, api.size()))
        left = 3 if (api.rank(), api.size()) == (0, 2) else -1
        while left:
            done = ops.allreduce(np.array(float(os.path.exists(gate))), op=api.Max, name="done")
            left -= 1
            state.step += 1
            print(f"step {state.step} in {api.size()}", flush=True)
            if done:
                break
            state.check_host_updates()
        print("joins", flush=True)
        ops.join()
        state.commit()

    state: Any = ObjectState(step=0)
    loop(state)
    api.shutdown()
    return worlds, state.step


def _twice(state: Any) -> int:
    """Run another training after the first one."""
    @run
    def loop(state: Any) -> int:
        return int(ops.allreduce(np.ones(1), op=api.Sum)[0])

    return loop(state) + loop(state)


def _nested(state: Any) -> str:
    @run
    def inner(state: Any) -> None:
        raise AssertionError("it was called")

    @run
    def outer(state: Any) -> str:
        try:
            inner(state)
        except UnsupportedError as error:
            return str(error)
        return "no error"

    return str(outer(state))


def compute(gate: str) -> int:
    """Compute in the last rank without a collective, until the file `gate` exists; return the process."""
    api.init()

    @run
    def loop(state: Any) -> None:
        ops.allreduce(np.ones(1))
        print(f"world of {api.size()}", flush=True)
        while not os.path.exists(gate) and (api.rank() == api.size() - 1 > 0):
            sum(range(1000))
        ops.barrier()

    loop(ObjectState(step=0))
    api.shutdown()
    return os.getpid()


class CorruptState(ObjectState):
    """A state whose weights rank 1 changes when it receives them in world 2, as faulty memory would."""

    def _take_position(self, position: Any) -> None:
        super()._take_position(position)
        if (api.rank(), api.worlds().coordinates.epoch) == (1, 2):
            self.weights[3] += 1


def with_a_corrupt_replica() -> None:
    """Train until the states of the ranks differ."""
    api.init()

    @run
    def loop(state: Any) -> None:
        while True:
            ops.allreduce(np.ones(1))
            print(f"world of {api.size()}", flush=True)
            state.commit()

    loop(CorruptState(weights=np.zeros(100), step=0))


def with_process_sets(gate: str) -> list[Any]:
    """Use process sets that outlive a world; return their ranks in each world, and sums over them."""
    api.init()
    pair, others = ProcessSet([0, 1]), ProcessSet([1, 2])
    api.add_process_set(pair)
    api.add_process_set(others)
    if api.is_provisional():
        assert ops.allreduce(np.ones(1), op=api.Sum, name="alone", process_set=pair) == 1
    state: Any = ObjectState(step=0)
    seen: list[Any] = []

    @run
    def loop(state: Any) -> None:
        mine = api.add_process_set([0]) if api.size() > 1 else None  # again in each call
        sums = [float(ops.allreduce(np.ones(1), op=api.Sum, process_set=each)[0]) if each.included() else None
                for each in (pair, others)]
        seen.append((pair.ranks, others.ranks, sums, mine is None or mine.size()))
        while True:
            done = ops.allreduce(np.array([float(os.path.exists(gate))]), op=api.Max)[0]
            print(f"world of {api.size()}", flush=True)
            if done:
                return
            state.commit()

    loop(state)
    api.shutdown()
    return seen


def until_the_launcher_ends() -> str:
    """Train until the launcher has gone; return the error."""
    api.init()
    state: Any = ObjectState(step=0)

    @run
    def loop(state: Any) -> None:
        while True:
            ops.allreduce(np.ones(1))
            print("trains", flush=True)

    try:
        loop(state)
    except LaunchError as error:
        print(f"ended: {error}", flush=True)
        raise
    return "it returned"
