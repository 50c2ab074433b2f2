"""`hvdlite`'s own collectives on CuPy's arrays, with doubles of CuPy and of the GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hvdlite
from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.runtime.arguments import wrap
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.cupy import ArrayDouble, on_gpu
from tests.gpu_double.gpu import GpuDouble
from tests.gpu_double.worlds import Gpus, install_gpus


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    made, current = install_gpus(monkeypatch), threading.local()
    somewhere = GpuDouble()
    monkeypatch.setitem(sys.modules, "cupy", somewhere.cupy)
    for module in (hvdlite.ops, hvdlite.transfers):
        monkeypatch.setattr(module, "runtime", lambda: current.runtime)
    monkeypatch.setattr(hvdlite.transfers, "rank", lambda: current.runtime.world.rank)
    monkeypatch.setattr(api.worlds(), "current", lambda: current.runtime)
    made.current = current  # type: ignore[attr-defined]
    yield made
    made.end()
    somewhere.end()


def test_every_collective(gpus: Any) -> None:
    def step(runtime: Runtime) -> None:
        gpus.current.runtime = runtime
        rank = runtime.world.rank
        ones = on_gpu(np.full((4, 3), rank + 1.0, np.float32))
        result = hvdlite.allreduce(ones, op=hvdlite.Sum)
        assert isinstance(result, ArrayDouble) and (result == 3).all() and (ones == rank + 1).all()
        assert (hvdlite.allreduce(ones.T, op=hvdlite.Average) == 1.5).all(), "any strides"
        mine = on_gpu(ones)
        assert hvdlite.allreduce_(mine, op=hvdlite.Max) is mine and (mine == 2).all()
        both = hvdlite.grouped_allreduce([on_gpu(ones), on_gpu([rank])], op=hvdlite.Sum)
        assert all(isinstance(each, ArrayDouble) for each in both) and both[1].tolist() == [1]
        mixed = hvdlite.grouped_allreduce([on_gpu(ones), np.full(2, rank)], op=hvdlite.Sum)
        assert isinstance(mixed[0], ArrayDouble) and mixed[1].tolist() == [1, 1]
        assert hvdlite.allgather(on_gpu([[rank]] * (rank + 1))).tolist() == [[0], [1], [1]]
        assert (hvdlite.broadcast(ones, 1) == 2).all() and (ones == rank + 1).all()
        assert hvdlite.reducescatter(on_gpu([1.0, 2.0]), op=hvdlite.Sum).tolist() == [2.0 * (rank + 1)]
        received, rows = hvdlite.alltoall(on_gpu([10 * rank, 10 * rank + 1]), [1, 1])
        assert received.tolist() == [rank, 10 + rank] and rows.tolist() == [1, 1]
        gathered = hvdlite.gather(on_gpu([rank]), 0)
        assert gathered is None if rank else gathered.tolist() == [0, 1]
        assert hvdlite.scatter(on_gpu([5 + rank, 6 + rank]), 1).tolist() == [6 + rank]
        reduced = hvdlite.reduce(on_gpu([rank + 1.0]), 1, op=hvdlite.Sum)
        assert reduced is None if rank == 0 else reduced.tolist() == [3.0]
        if rank == 0:
            hvdlite.send(on_gpu([7]), 1, "p")
        else:
            assert hvdlite.recv(on_gpu([0]), 0, "p").tolist() == [7]
        handle = hvdlite.allreduce_async(on_gpu(ones), op=hvdlite.Sum)
        assert (hvdlite.synchronize(handle) == 3).all() and hvdlite.poll(handle)
        with pytest.raises(UnsupportedError, match="not C-contiguous"):
            hvdlite.allreduce_(ones.T, op=hvdlite.Sum)
        with pytest.raises(UnsupportedError, match=r"NCCL has no allreduce of int16 with Sum.*asnumpy"):
            hvdlite.allreduce(on_gpu(np.ones(2, np.int16)), op=hvdlite.Sum)
    worlds.threads(2, step)
    assert "allReduce" in gpus.made[0].launches


def test_without_a_plane_for_gpus(gpus: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"no plane for GPUs; or pass cupy.asnumpy"):
        wrap(on_gpu([1.0]), "x", None, hvdlite.core.types.Collective.ALLREDUCE)
