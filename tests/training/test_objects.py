"""Objects between ranks: all kinds arrive, and what cannot be sent is everybody's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import ProtocolError, UnsupportedError
from hvdlite.planes.base import Plan, Plane, WaitUntil
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.objects import allgather_object, broadcast_object, dumps
from tests.worlds import threads


def test_objects_of_different_types_and_lengths() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        values = [None, {"a": [1, 2]}, "x" * 100_000]
        assert broadcast_object(runtime, values[rank], 2, "b") == values[2]
        assert allgather_object(runtime, values[rank], "g") == values
    threads(3, step)


def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks_and_the_job_goes_on() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        value = (each for each in "ab") if rank == 1 else "fine"
        told = "rank 1's object cannot be pickled: TypeError: cannot pickle 'generator' object"
        for call in (lambda: broadcast_object(runtime, value, 1, "x"), lambda: allgather_object(runtime, value, "x")):
            with pytest.raises(UnsupportedError, match=told) as caught:
                call()
            assert isinstance(caught.value.__cause__, TypeError) == (rank == 1)
        assert broadcast_object(runtime, value, 0, "x") == "fine"
        assert allgather_object(runtime, rank, "x") == [0, 1, 2]
    threads(3, step)


def test_ranks_that_have_joined_send_nothing() -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank:
            assert allgather_object(runtime, runtime.world.rank, "x") == [1, 2]
        runtime.join().wait()
    threads(3, step)


class Bomb:
    """Its unpickling is an attack that has succeeded."""

    exploded: list[str] = []  # noqa: RUF012 - of all copies

    def __reduce__(self) -> tuple[Any, ...]:
        return Bomb.exploded.append, ("unpickled",)


def attacked(rank: int, plane: Plane) -> Plane:
    """Let a stranger in a plane's connections replace what arrives by a pickle of its own."""
    execute, attack = plane.execute, np.frombuffer(dumps(Bomb()), np.uint8)

    def execute_and_replace(plan: Plan, wait_until: WaitUntil) -> None:
        execute(plan, wait_until)
        for output in plan.outputs:
            output[:attack.size] = attack[:output.size]

    plane.execute = execute_and_replace  # type: ignore[method-assign]
    return plane


def broadcast(runtime: Runtime, value: object) -> object:
    return broadcast_object(runtime, value, 0, "x")


def allgather(runtime: Runtime, value: object) -> object:
    return allgather_object(runtime, value, "x")


# docs/protocol.md#objects
@pytest.mark.parametrize("eager_limit", [0, 8 << 10])
@pytest.mark.parametrize("call", [broadcast, allgather])
def test_only_what_a_rank_has_sent_is_unpickled(call: Callable[[Runtime, object], object], eager_limit: int) -> None:
    """The summary travels over the control plane even if no other tensor does."""
    def step(runtime: Runtime) -> None:
        value = "x" * (1 << 14)
        if call is broadcast and runtime.world.rank == 0:
            assert call(runtime, value) == value  # its own
            return
        with pytest.raises(ProtocolError, match="arrived with other bytes than rank 0 has sent, and is not unpickled"):
            call(runtime, value)
    threads(2, step, wrap=attacked, eager_limit=eager_limit)
    assert not Bomb.exploded
