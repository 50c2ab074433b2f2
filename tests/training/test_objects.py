"""Objects between ranks: all kinds arrive, and what cannot be sent is everybody's error."""

from __future__ import annotations

import pytest

from hvdlite.core.errors import UnsupportedError
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.objects import allgather_object, broadcast_object
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
