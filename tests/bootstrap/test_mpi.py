"""Scripts under mpiexec, without hvdrun: ranks, local ranks and the key come over MPI; `init` takes communicators."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpis import MPIS, ROOT, Mpi, mpiexec

SCRIPT = """
import json, sys
import numpy as np
import hvdlite as hvd
from mpi4py import MPI
world, how = MPI.COMM_WORLD, sys.argv[1]
given = {"none": lambda: None, "world": lambda: world, "split": lambda: world.Split(world.rank % 2, -world.rank),
         "ranks": lambda: [0, 2] if world.rank in (0, 2) else [3, 1]}[how]()
for _ in range(2):
    hvd.init(comm=given)
    total = hvd.allreduce(np.full(100_000, world.rank), op=hvd.Sum)[0]
    with open(f"{sys.argv[2]}.{world.rank}", "a") as out:
        print(json.dumps([hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
                          hvd.cross_size(), int(total), hvd.mpi_enabled() and hvd.mpi_threads_supported()]), file=out)
    hvd.shutdown()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def told(mpi: Mpi, script: str, how: str, **environment: str) -> list[list[int]]:
    """Return what each rank says of itself, twice the same, in MPI's order."""
    ended = mpiexec(mpi, 4, [script, how, script], environment=environment)
    assert ended.returncode == 0, ended.stderr
    lines = [Path(f"{script}.{rank}").read_text(encoding="utf-8").splitlines() for rank in range(4)]
    assert all(first == again for first, again in lines)
    return [json.loads(first) for first, _ in lines]


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(("how", "plane"), [("none", "mpi"), ("none", "auto"), ("world", "mpi"), ("split", "mpi"),
                                            ("ranks", "mpi"), ("ranks", "auto")])
def test_all_ranks_or_some(mpi: Mpi, script: str, how: str, plane: str) -> None:
    ranks = told(mpi, script, how, HVDLITE_CPU_OPERATIONS=plane)
    on = plane == "mpi"
    if how in ("none", "world"):
        assert ranks == [[rank, 4, rank, 4, 0, 1, 6, on] for rank in range(4)]
    else:
        order = {"split": [1, 1, 0, 0], "ranks": [0, 1, 1, 0]}[how]
        assert ranks == [[order[rank], 2, order[rank], 2, 0, 1, (2, 4)[rank % 2], on] for rank in range(4)]


SPLIT = """
import numpy as np
import hvdlite as hvd
from mpi4py import MPI
world = MPI.COMM_WORLD
halves = hvd.ProcessSet(world.Split(world.rank % 2, -world.rank))
pair = hvd.ProcessSet(world.Split(0 if world.rank in (1, 2) else MPI.UNDEFINED, world.rank))
assert halves.size() is None
hvd.init(world, process_sets=[halves, pair])
mine = [rank for rank in range(4) if rank % 2 == world.rank % 2]
assert halves.included() and halves.ranks == mine and halves.size() == 2 and halves.rank() == world.rank // 2, halves
assert hvd.allreduce(np.full(3, world.rank), op=hvd.Sum, process_set=halves)[0] == sum(mine)
assert (pair.ranks, pair.included()) == (([1, 2], True) if world.rank in (1, 2) else ([], None)), pair
if pair.included():
    assert hvd.allreduce(np.full(3, 1), op=hvd.Sum, process_set=pair)[0] == 2
assert halves.registered_ids == (1, 2) and pair.registered_ids == (3,)
assert hvd.remove_process_set(halves) and hvd.remove_process_set(pair) and not hvd.remove_process_set(halves)
assert halves.process_set_id is None and hvd.add_process_set([0, 2]).process_set_id == 4
hvd.shutdown()
"""


@pytest.mark.parametrize("mpi", MPIS[:1])
def test_the_parts_of_a_split_are_process_sets(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "split.py").write_text(SPLIT)
    ended = mpiexec(mpi, 4, [str(tmp_path / "split.py")])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("mpi", MPIS[:1])
@pytest.mark.parametrize("plane", ["hierarchical", "gloo"])
def test_several_hosts(mpi: Mpi, script: str, plane: str) -> None:
    """MPICH can make believe that its processes are on two hosts, every other one on each."""
    ranks = told(mpi, script, "world", HVDLITE_CPU_OPERATIONS=plane, MPIR_CVAR_NUM_CLIQUES="2")
    assert sorted(rank[2:6] for rank in ranks) == [[0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 2], [1, 2, 1, 2]]
    assert all(rank[6:] == [6, plane == "hierarchical"] for rank in ranks)


def test_without_an_mpi_the_error_says_what_to_install() -> None:
    source = "import sys; sys.modules['mpi4py'] = None\nimport hvdlite\nhvdlite.init()"
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
                   "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    ended = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False)
    assert "LaunchError" in ended.stderr and "pip install mpi4py" in ended.stderr and "HVDLITE_SECRET" in ended.stderr


DEATH = """
import os, sys
import numpy as np
import hvdlite as hvd
hvd.init()
values = np.ones(400_000, np.float32)
for step in range(10**9):
    hvd.allreduce(values, name="x")
    if step == 20 and hvd.rank() == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), 9)
        raise RuntimeError("it gives up")
"""


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_death_ends_the_job_and_names_the_rank(mpi: Mpi, how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DEATH)
    ended = mpiexec(mpi, 3, [str(tmp_path / "script.py"), how], timeout=30, environment={"HVDLITE_CPU_OPERATIONS": "mpi"})
    assert ended.returncode not in (0, 9999), ended.stderr
    if how == "raises" or mpi.name != "MPICH":  # whose mpiexec ends the others before they can say anything
        assert "rank 1 " in ended.stderr, ended.stderr
