"""The variables of `torch.distributed`, from those of other launchers."""

from __future__ import annotations

import pytest

from hvdlite.bootstrap.environments import PORTS, check_host, torch_variables
from hvdlite.core.errors import LaunchError

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "job 1"}
TWO_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
         "SLURM_NODEID": "1", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[03-04]"}


@pytest.mark.parametrize(("given", "expected"), [
    (OPEN_MPI, ("3", "4", "3", "4", "127.0.0.1")), (MPICH, ("1", "2", "1", "2", "127.0.0.1")),
    (SLURM, ("5", "8", "1", "4", "n03")),
    ({**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"},
     ("1", "4", "1", "4", "127.0.0.1")),
    ({**TWO_HOSTS, "MASTER_ADDR": "h"}, ("3", "4", "1", "2", None))])
def test_they_are_derived(given: dict[str, str], expected: tuple[str, ...]) -> None:
    found = torch_variables(given, 1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert tuple(found.get(name) for name in names) == expected
    assert int(found["MASTER_PORT"]) in PORTS and torch_variables({**given}, 1) == found


def test_the_host_of_rank_0_needs_an_address() -> None:
    check_host("127.0.0.1")
    check_host("")
    with pytest.raises(LaunchError, match=r"no\.such\.host\.invalid, the host of rank 0, has no address .*MASTER_ADDR"):
        check_host("no.such.host.invalid")


def test_jobs_have_ports_of_their_own() -> None:
    ports = {torch_variables({**OPEN_MPI, "PMIX_NAMESPACE": f"job {job}"}, 1)["MASTER_PORT"] for job in range(20)}
    ports |= {torch_variables(MPICH, parent)["MASTER_PORT"] for parent in range(20)}
    assert len(ports) > 35


def test_what_is_set_stays() -> None:
    assert torch_variables({"RANK": "0", "WORLD_SIZE": "2", **OPEN_MPI}, 1) == {}
    assert "MASTER_PORT" not in torch_variables({**OPEN_MPI, "MASTER_PORT": "5"}, 1)


@pytest.mark.parametrize(("given", "said"), [
    ({}, "no launcher that is known has started this process"),
    (TWO_HOSTS, "Open MPI: the ranks are on several hosts, .* set MASTER_ADDR")])
def test_what_is_missing_is_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        torch_variables(given, 1)
