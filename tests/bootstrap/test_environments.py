"""Who am I? Tables in, places out; and the real launchers that are at hand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.bootstrap.environments import ENVIRONMENTS, PORTS, first_host, read_launch_info
from hvdlite.core.errors import LaunchError
from hvdlite.core.world import World


def test_alone() -> None:
    info = read_launch_info({}, parent=1)
    assert info.environment == "none" and info.world == World()


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda row: row.name)
def test_every_row_of_the_table(environment: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    row = environment
    variables = {row.rank: "1", row.size: "3", row.local_rank: "1", row.local_size: "3"}  # type: ignore[attr-defined]
    marked = variables | dict.fromkeys(row.job, str(tmp_path))  # type: ignore[attr-defined]
    info = read_launch_info(marked, parent=1)
    assert info.environment == row.name and info.world == World(1, 3, 1, 3)  # type: ignore[attr-defined]
    assert read_launch_info(marked, parent=2).job_directory == info.job_directory, "ranks must derive the same directory"
    assert read_launch_info(variables, parent=1).job_directory != read_launch_info(variables, parent=2).job_directory


def test_jobs_that_differ_meet_in_different_places_and_are_told_apart() -> None:
    """By the launcher's ids, rank 0's host and the key; a job's ranks on different hosts have one id."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
                "MASTER_ADDR": "a", "MASTER_PORT": "29500", "HVDLITE_SECRET": "ab" * 16}
    jobs = [read_launch_info({**torchrun, **other}, parent=1) for other in (
        {}, {"MASTER_ADDR": "b"}, {"MASTER_PORT": "29501"}, {"HVDLITE_SECRET": "cd" * 16})]
    assert len({info.job_directory for info in jobs}) == 4
    assert len({info.job for info in jobs}) == 3, "rank 0's host may have several names"
    assert read_launch_info({**torchrun, "RANK": "2"}, parent=2).job == jobs[0].job
    assert "ab" * 16 not in jobs[0].job_directory + jobs[0].job


@pytest.mark.parametrize(("variables", "told"), [
    ({"HVDLITE_SIZE": "2"}, "HVDLITE_RANK is not set"),
    ({"RANK": "0"}, "WORLD_SIZE is not set"),
    ({"HVDLITE_RANK": "2", "HVDLITE_SIZE": "2"}, "rank 2 is not in 0..1"),
    ({"RANK": "0", "MASTER_ADDR": "x", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "HVDLITE_SECRET"),
    ({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "4", "HVDLITE_LOCAL_SIZE": "2", "HVDLITE_SECRET": "ab" * 16},
     "HVDLITE_COORDINATOR"),
    ({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_SECRET": "xyz"}, "hexadecimal"),
    ({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_SECRET": "00"}, "HVDLITE_SECRET has 1 bytes, and could be guessed"),
    ({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_COORDINATOR": "nowhere"}, "not host:port"),
    ({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_COORDINATOR": "a:65536"}, "not host:port.* at most 65535"),
])
def test_a_contradiction_is_a_clear_error(variables: dict[str, str], told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        read_launch_info(variables, parent=1)


def test_on_several_hosts_all_ranks_expect_rank_0_in_the_same_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torchrun = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
                "HVDLITE_SECRET": "ab" * 16}
    first, last = (read_launch_info({**torchrun, "RANK": rank, "LOCAL_RANK": "0"}, parent=1) for rank in ("0", "2"))
    assert first.coordinator == last.coordinator and first.coordinator is not None and first.on_several_hosts
    assert first.coordinator[0] == "10.0.0.1" and first.coordinator[1] in PORTS and first.key == b"\xab" * 16
    slurm = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
             "SLURM_STEP_TASKS_PER_NODE": "2,1,2", "SLURM_STEP_NODELIST": "node[07-08],big3", "HVDLITE_SECRET": "ab" * 16}
    info = read_launch_info(slurm, parent=1)
    assert info.world.local_size == 2 and info.coordinator is not None and info.coordinator[0] == "node07"
    given = read_launch_info({**slurm, "HVDLITE_COORDINATOR": "[fe80::1]:99"}, parent=1)
    assert given.coordinator == ("fe80::1", 99)


@pytest.mark.parametrize(("text", "host"), [("a", "a"), ("n[1-3,7],m", "n1"), ("n[03]", "n03"), ("x1,x2", "x1"),
                                            ("r[1-2]n[4-5]", "r1n4")])
def test_the_first_host_of_a_list(text: str, host: str) -> None:
    assert first_host(text) == host


def test_the_key_can_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("abcd" * 8 + "\n")
    variables = {"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_SECRET_FILE": str(file),
                 "HVDLITE_JOB_DIRECTORY": str(tmp_path)}
    file.chmod(0o644)
    with pytest.raises(LaunchError, match=r"other users can read it.*defaultMode: 0400"):
        read_launch_info(variables, parent=1)
    file.chmod(0o600)
    assert read_launch_info(variables, parent=1).key == b"\xab\xcd" * 8
    with pytest.raises(LaunchError, match="No such file"):
        read_launch_info({**variables, "HVDLITE_SECRET_FILE": "/nowhere"}, parent=1)


def test_a_pod_of_an_indexed_job() -> None:
    pod = {"JOB_COMPLETION_INDEX": "2", "HVDLITE_SIZE": "4", "HVDLITE_COORDINATOR": "train-0.train:29400",
           "HVDLITE_SECRET": "ab" * 32}
    info = read_launch_info(pod, parent=1)
    assert info.world == World(2, 4, 0, 1, 2, 4) and info.coordinator == ("train-0.train", 29400)
    inside = {**pod, "HVDLITE_RANK": "1", "HVDLITE_SIZE": "2", "HVDLITE_LOCAL_RANK": "1", "HVDLITE_LOCAL_SIZE": "2"}
    assert read_launch_info(inside, parent=1).world == World(1, 2, 1, 2), "hvdrun in a pod says more"
    assert read_launch_info({"JOB_COMPLETION_INDEX": "2"}, parent=1).world == World()


def test_a_joiner_of_an_elastic_job_is_told_later_where_rank_0_listens() -> None:
    joiner = {"HVDLITE_RANK": "2", "HVDLITE_SIZE": "3", "HVDLITE_LOCAL_RANK": "0", "HVDLITE_LOCAL_SIZE": "1",
              "HVDLITE_SECRET": "ab" * 32, "HVDLITE_JOB_DIRECTORY": "/job", "HVDLITE_MEMBER": "5", "HVDLITE_JOINER": "1"}
    info = read_launch_info(joiner, parent=1)
    assert info.coordinator is None and (info.world.rank, info.world.size, info.world.local_size) == (2, 3, 1)
    del joiner["HVDLITE_JOINER"]
    with pytest.raises(LaunchError, match="HVDLITE_COORDINATOR"):
        read_launch_info(joiner, parent=1)


def test_whose_variables_count_inside_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}
    assert read_launch_info(batch, parent=1).environment == "none", "a batch script is no task of a step"
    step = {**batch, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_TASKS_PER_NODE": "3"}
    assert read_launch_info({**step, "PMI_RANK": "1", "PMI_SIZE": "3"}, parent=1).environment == "Slurm"
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert read_launch_info({**batch, **hydra}, parent=1).environment == "MPICH", "mpiexec in a batch script"


def test_a_pmix_launcher_that_does_not_say_enough() -> None:
    with pytest.raises(LaunchError, match="rank 3, but the number of ranks is not in the environment: set HVDLITE_SIZE"):
        read_launch_info({"PMIX_RANK": "3", "PMIX_NAMESPACE": "job"}, parent=1)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torchrun comes with torch")
def test_under_torchrun(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parent / "programs/two_ranks.py"
    ended = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)],
                           capture_output=True, text=True, env=environment, timeout=100,
                           check=False)
    assert ended.returncode == 0 and ended.stdout.count("fine") == 2, ended.stderr
    assert not list(tmp_path.glob("hvdlite-*"))
