"""Scripts under mpiexec, without hvdrun: ranks, local ranks and the key come over MPI; `init` takes communicators."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpis import MPIS, Mpi, mpiexec
from tests.worlds import PYTHON_PATH

PROGRAMS = Path(__file__).parent / "programs"


def told(mpi: Mpi, out: Path, how: str, **environment: str) -> list[list[int]]:
    """Return what each rank says of itself, twice the same, in MPI's order."""
    ended = mpiexec(mpi, 4, [str(PROGRAMS / "mpi_ranks.py"), how, str(out)], environment=environment)
    assert ended.returncode == 0, ended.stderr
    lines = [(out / str(rank)).read_text(encoding="utf-8").splitlines() for rank in range(4)]
    assert all(first == again for first, again in lines)
    return [json.loads(first) for first, _ in lines]


WAYS = [("none", "mpi"), ("none", "auto"), ("world", "mpi"), ("split", "mpi"), ("ranks", "mpi"), ("ranks", "auto")]
OFTEN = {"MPICH": WAYS, "Open MPI": [("none", "auto"), ("split", "mpi"), ("ranks", "auto")]}
"""Who takes part is found out in Python: `long` has all ways with each library."""


@pytest.mark.parametrize(("mpi", "how", "plane"), [
    pytest.param(*mpi.values, *way, id=f"{'-'.join(way)}-{mpi.id}",
                 marks=[*mpi.marks, *([] if way in OFTEN[mpi.values[0].name] else [pytest.mark.long])])
    for way in WAYS for mpi in MPIS])
def test_all_ranks_or_some(mpi: Mpi, tmp_path: Path, how: str, plane: str) -> None:
    ranks = told(mpi, tmp_path, how, HVDLITE_CPU_OPERATIONS=plane)
    on = plane == "mpi"
    if how in ("none", "world"):
        assert ranks == [[rank, 4, rank, 4, 0, 1, 6, on] for rank in range(4)]
    else:
        order = {"split": [1, 1, 0, 0], "ranks": [0, 1, 1, 0]}[how]
        assert ranks == [[order[rank], 2, order[rank], 2, 0, 1, (2, 4)[rank % 2], on] for rank in range(4)]


@pytest.mark.parametrize("mpi", MPIS[:1])
def test_the_parts_of_a_split_are_process_sets(mpi: Mpi) -> None:
    ended = mpiexec(mpi, 4, [str(PROGRAMS / "mpi_split.py")])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("mpi", MPIS[:1])
def test_ranks_of_a_host_with_different_directories_for_temporary_files_are_told(mpi: Mpi) -> None:
    ended = mpiexec(mpi, 3, [str(PROGRAMS / "mpi_directories.py")])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("mpi", MPIS[:1])
@pytest.mark.parametrize("plane", ["hierarchical", pytest.param("gloo", marks=pytest.mark.long)])
def test_several_hosts(mpi: Mpi, tmp_path: Path, plane: str) -> None:
    """MPICH can make believe that its processes are on two hosts, every other one on each."""
    ranks = told(mpi, tmp_path, "world", HVDLITE_CPU_OPERATIONS=plane, MPIR_CVAR_NUM_CLIQUES="2")
    assert sorted(rank[2:6] for rank in ranks) == [[0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 2], [1, 2, 1, 2]]
    assert all(rank[6:] == [6, plane == "hierarchical"] for rank in ranks)


def test_without_an_mpi_the_error_says_what_to_install() -> None:
    source = "import sys; sys.modules['mpi4py'] = None\nimport hvdlite\nhvdlite.init()"
    environment = {"PATH": "/usr/bin", "PYTHONPATH": PYTHON_PATH, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
                   "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    ended = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False)
    assert "LaunchError" in ended.stderr and "pip install mpi4py" in ended.stderr and "HVDLITE_SECRET" in ended.stderr


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_death_ends_the_job_and_names_the_rank(mpi: Mpi, how: str) -> None:
    ended = mpiexec(mpi, 3, [str(PROGRAMS / "mpi_death.py"), how], timeout=30, environment={"HVDLITE_CPU_OPERATIONS": "mpi"})
    assert ended.returncode not in (0, 9999), ended.stderr
    if how == "raises" or mpi.name != "MPICH":  # whose mpiexec ends the others before they can say anything
        assert "rank 1 " in ended.stderr, ended.stderr
