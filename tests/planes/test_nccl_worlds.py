"""The plane for GPUs when worlds of an elastic job end and begin (docs/protocol.md#the-end-of-a-world), over a double."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.core.config import Config
from hvdlite.core.errors import HorovodInternalError
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.nccl import CommunicatorDouble, NcclErrorDouble
from tests.gpu_double.worlds import Gpus, allreduce, spin
from tests.gpu_double.worlds import gpus as gpus


def in_world(epoch: int, size: int, step: Callable[[Runtime], None]) -> None:
    """Run `step` on the ranks of a world; a rank may end its world as a member does."""
    runtimes = worlds.assemble_threads(size, Config.from_environment({}, shutdown_timeout=10.0), epoch=epoch)
    errors: list[BaseException] = []

    def body(runtime: Runtime) -> None:
        runtime.start()
        try:
            step(runtime)
        except BaseException as error:
            errors.append(error)
            runtime.fail(type(error).__name__, str(error), "")
        finally:
            runtime.shutdown()
    threads = [threading.Thread(target=body, args=(runtime,), daemon=True) for runtime in runtimes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def lose(gpus: Gpus, made: int, launched: threading.Barrier, runtime: Runtime) -> None:
    """Lose a world in the middle of a collective: the last rank's GPU does not come to it.

    Args:
        made: how many GPUs were made before this world's.
        launched: of all ranks of the world.
    """
    rank = runtime.world.rank
    allreduce(gpus, runtime, "first", np.ones(2)).wait()
    gpu, is_last = gpus.made[made + rank], rank == runtime.world.size - 1
    if is_last:
        gpu.hold(gpu.stream)
    handle = allreduce(gpus, runtime, "x", np.ones(3))
    handle.wait()
    assert handle.completion is not None
    launched.wait(20)
    if is_last:
        runtime.stop("a rank was lost")
    with pytest.raises(HorovodInternalError, match="a rank was lost"):
        handle.completion.wait()
    gpu.release(gpu.stream)


@pytest.mark.parametrize("victim_size", [2, 3])
def test_survivors_come_free_and_the_next_world_has_communicators_of_its_own(gpus: Gpus, victim_size: int) -> None:
    launched = threading.Barrier(victim_size)
    in_world(1, victim_size, functools.partial(lose, gpus, 0, launched))
    old = [each for gpu in gpus.made for each in gpu.nccl.communicators]
    assert all(each.ended for each in old)
    sizes: list[int] = []

    def step(runtime: Runtime) -> None:
        values = np.full(3, runtime.world.rank + 1.0)
        handle = allreduce(gpus, runtime, "x", values)  # a name that the old world had, too
        handle.wait()
        assert handle.completion is not None
        handle.completion.wait()
        assert (values == 3).all()
        (communicator,) = gpus.made[victim_size + runtime.world.rank].nccl.communicators
        assert communicator not in old
        sizes.append(communicator.size)
    in_world(2, 2, step)
    assert sizes == [2, 2]


def test_twenty_worlds_hold_what_one_holds(gpus: Gpus) -> None:
    """They are lost and left in turn; each has another size than the one before."""
    def left(runtime: Runtime) -> None:
        begun_here = allreduce(gpus, runtime, "x", np.ones(1000))
        begun_here.wait()
        assert begun_here.completion is not None
        begun_here.completion.wait()

    for epoch in range(1, 21):
        size = 2 + epoch % 2
        lost = functools.partial(lose, gpus, len(gpus.made), threading.Barrier(size))
        in_world(epoch, size, left if epoch % 3 == 0 else lost)
        gpus.planes.clear()

    def nothing_is_held() -> bool:
        gc.collect()  # what threads that are just ending hold
        return not any(any(gpu.held().values()) for gpu in gpus.made) and not any(
            "hvdlite-nccl" in thread.name for thread in threading.enumerate())
    spin(nothing_is_held)


def test_a_communicator_that_is_made_too_late_is_aborted(gpus: Gpus) -> None:
    """Its world is lost while the ranks' NCCLs meet, which no abort can interrupt."""
    may_meet, come = threading.Event(), threading.Barrier(3)

    def step(runtime: Runtime) -> None:
        gpus.wrap(runtime, np.ones(1))
        device: Any = gpus.made[runtime.world.rank].device
        real = device.communicator

        def late(*arguments: Any) -> Any:
            come.wait(20)
            may_meet.wait(20)
            return real(*arguments)
        device.communicator = late
        handle = allreduce(gpus, runtime, "x", np.ones(3))
        if runtime.world.rank == 0:
            come.wait(20)
            runtime.stop("a rank was lost")
        with pytest.raises(HorovodInternalError, match="a rank was lost"):
            handle.wait()
    in_world(1, 2, step)
    may_meet.set()
    spin(lambda: not any("hvdlite-nccl" in thread.name for thread in threading.enumerate()))
    assert not any(gpu.held()["communicators"] for gpu in gpus.made)


def test_a_communicator_whose_ranks_are_connecting_is_aborted(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its world is lost while its first collective waits for another rank; no process set has it yet."""
    both = threading.Barrier(3)

    def connects(communicator: CommunicatorDouble, *_: Any) -> None:
        both.wait(20)
        spin(lambda: communicator.ended)
        raise NcclErrorDouble("it has been aborted")
    monkeypatch.setattr(CommunicatorDouble, "allReduce", connects)

    def step(runtime: Runtime) -> None:
        handle = allreduce(gpus, runtime, "x", np.ones(3))
        if runtime.world.rank == 0:
            both.wait(20)
            runtime.stop("a rank was lost")
        with pytest.raises(HorovodInternalError, match="a rank was lost"):
            handle.wait()
    in_world(1, 2, step)
    assert not any(gpu.held()["streams"] for gpu in gpus.made), "launch threads have ended, so that all is released"
    assert not any(gpu.held()["communicators"] for gpu in gpus.made)

