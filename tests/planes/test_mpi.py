"""The MPI plane: the contract suite with each library's mpiexec, pieces of what is too long for one call, thread levels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite.planes.mpi import check_threads
from tests.mpis import MPIS, ROOT, Mpi, mpiexec


@pytest.mark.slow
@pytest.mark.parametrize("mpi", MPIS)
def test_the_contract_suite(mpi: Mpi) -> None:
    suite = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT),
             str(ROOT / "tests/planes/test_contract.py"), "-k", "mpi"]
    ended = mpiexec(mpi, 4, suite, timeout=150, environment={"CONTRACT_UNDER_MPI": "1"})
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert ended.stdout.count(" passed") == 4


PIECES = """
import numpy as np
from mpi4py import MPI
from hvdlite.planes import mpi
mpi.LIMIT = 1 << 12
link = mpi._connect(MPI, MPI.COMM_WORLD.Dup(), 0, (0, 1, 2), None)
def wait(predicate, *, pause=0.0):
    while not predicate():
        pass
me, count = link._index, 5000
rows = [1000 * (rank + 1) for rank in range(3)]
bounds = [0, 1000, 3000, 6000]
values = np.arange(count, dtype=np.int64)
link.allreduce(values, mpi.ReduceOp.SUM, wait)
assert (values == 3 * np.arange(count)).all()
values = np.arange(count, dtype=np.int64) + me
link.reduce(values, mpi.ReduceOp.SUM, 1, wait)
assert me != 1 or (values == 3 * np.arange(count) + 3).all()
values = np.full(count, me, np.uint8)
link.broadcast(values, 2, wait)
assert (values == 2).all()
own = np.full(rows[me], me, np.float32)
out = np.zeros(6000, np.float32)
link.allgather(own, out, bounds, wait)
assert (out == np.repeat([0, 1, 2], rows)).all()
out[:] = 0
link.gather(own, out if me == 1 else None, bounds, 1, wait)
assert me != 1 or (out == np.repeat([0, 1, 2], rows)).all()
link.scatter(np.repeat([4, 5, 6], rows).astype(np.float32) if me == 2 else None, own, bounds, 2, wait)
assert (own == me + 4).all()
sent = np.repeat(np.arange(3) + 10 * me, rows).astype(np.float32)
got = np.zeros(3 * rows[me], np.float32)
link.exchange(sent, bounds, got, [0, rows[me], 2 * rows[me], 3 * rows[me]], 9000, wait)
assert (got == np.repeat([me, me + 10, me + 20], rows[me])).all()
link.close()
print("fine")
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_what_is_too_long_for_one_call_travels_in_pieces(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "pieces.py").write_text(PIECES)
    ended = mpiexec(mpi, 3, [str(tmp_path / "pieces.py")])
    assert ended.returncode == 0 and ended.stdout.count("fine") == 3, ended.stderr


@pytest.mark.parametrize(("level", "told"), [(0, "MPI_THREAD_SINGLE"), (1, "MPI_THREAD_FUNNELED"), (2, ""), (3, "")])
# docs/protocol.md#mpi
def test_thread_levels(level: int, told: str, caplog: pytest.LogCaptureFixture) -> None:
    mpi = SimpleNamespace(THREAD_SINGLE=0, THREAD_FUNNELED=1, THREAD_SERIALIZED=2, THREAD_MULTIPLE=3,
                          Query_thread=lambda: level)
    communicator = SimpleNamespace(Get_rank=lambda: 0)
    if told:
        with pytest.raises(LaunchError, match=f"{told}.*MPI_THREAD_MULTIPLE"):
            check_threads(mpi, communicator)
    else:
        check_threads(mpi, communicator)
    assert ("must not call MPI" in caplog.text) == (level == 2)
