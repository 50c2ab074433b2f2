"""Tensors from one rank to another."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.core.errors import MismatchError, PeerLeftError, UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from tests.runtime.programs import send as programs
from tests.worlds import processes, threads


@pytest.mark.parametrize("count", [0, 4, 50_000])
# docs/protocol.md#pairs
def test_a_ring_and_everybody_with_everybody(count: int) -> None:
    size = 4

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        after, before = (rank + 1) % size, (rank - 1) % size
        mine = np.full(count, rank, np.int16)
        mine.flags.writeable = False  # a sender's tensor is only read
        sent = runtime.send(f"ring.{rank}", mine, after)
        assert (runtime.receive(f"ring.{before}", np.empty(count, np.int16), before).wait() == before).all()
        assert sent.wait() is None
        handles = [runtime.send(f"{rank}to{other}", mine, other) for other in range(size) if other != rank]
        for other in range(size):
            if other != rank:
                assert (runtime.receive(f"{other}to{rank}", np.empty(count, np.int16), other).wait() == other).all()
        for handle in handles:
            handle.wait()
        total = runtime.allreduce("x", np.ones(count), np.empty(count), ReduceOp.SUM).wait()
        assert (total == size).all()
    threads(size, step)


def test_what_cannot_be_sent() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        for other in (rank, 3, -1):
            with pytest.raises(UnsupportedError, match=f"not with {other}"):
                runtime.send("x", np.ones(3), other)
        if rank < 2:
            with pytest.raises(MismatchError, match=r"shape of 'x': rank 0: \[2\]; rank 1: \[3\]"):
                runtime.send("x", np.ones(2), 1).wait() if rank == 0 else runtime.receive("x", np.ones(3), 0).wait()
            with pytest.raises(MismatchError, match="root rank of 'y'"):  # both send
                runtime.send("y", np.ones(2), 1 - rank).wait()
        runtime.barrier("b").wait()
        if rank == 2:
            runtime.join().wait()
            return
        if rank == 0:
            with pytest.raises(MismatchError, match="needs rank 2, which has joined"):
                runtime.receive("z", np.ones(2), 2).wait()
        runtime.join().wait()
    threads(3, step)


def test_a_receiver_learns_that_the_sender_left() -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 0:
            with pytest.raises(PeerLeftError, match="rank 1"):
                runtime.receive("x", np.ones(2), 1).wait()
    threads(2, step)


def test_between_processes() -> None:
    processes(3, programs.between_processes)
