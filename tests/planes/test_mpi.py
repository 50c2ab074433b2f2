"""The MPI plane: the contract suite with each library's mpiexec, pieces of what is too long for one call, thread levels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite.planes.mpi import check_thread_level
from tests.mpis import MPIS, Mpi, mpiexec
from tests.worlds import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("mpi", MPIS)
def test_the_contract_suite(mpi: Mpi) -> None:
    suite = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(ROOT),
             *map(str, Path(__file__).parent.glob("test_contract_*.py")), "-k", "mpi"]
    ended = mpiexec(mpi, 4, suite, timeout=150, environment={"CONTRACT_UNDER_MPI": "1"})
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert ended.stdout.count(" passed") == 4


@pytest.mark.parametrize("mpi", MPIS)
def test_what_is_too_long_for_one_call_travels_in_pieces(mpi: Mpi) -> None:
    ended = mpiexec(mpi, 3, [str(Path(__file__).parent / "programs/mpi_pieces.py")])
    assert ended.returncode == 0 and ended.stdout.count("fine") == 3, ended.stderr


@pytest.mark.parametrize(("level", "told"), [(0, "MPI_THREAD_SINGLE"), (1, "MPI_THREAD_FUNNELED"), (2, ""), (3, "")])
# docs/protocol.md#mpi
def test_thread_levels(level: int, told: str, caplog: pytest.LogCaptureFixture) -> None:
    mpi = SimpleNamespace(THREAD_SINGLE=0, THREAD_FUNNELED=1, THREAD_SERIALIZED=2, THREAD_MULTIPLE=3,
                          Query_thread=lambda: level)
    communicator = SimpleNamespace(Get_rank=lambda: 0)
    if told:
        with pytest.raises(LaunchError, match=f"{told}.*MPI_THREAD_MULTIPLE"):
            check_thread_level(mpi, communicator)
    else:
        check_thread_level(mpi, communicator)
    assert ("must not call MPI" in caplog.text) == (level == 2)
