"""Who am I? A launch environment is a row of a table; the first row whose variables are set wins.

| row | set by |
|---|---|
| hvdlite | hvdrun, or by hand |
| torchrun, Slurm, Open MPI, MPICH and kin | their launchers; one host for now |
| none | nobody: the script runs alone, as size 1 |
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvdlite.core import launch_contract as contract
from hvdlite.core.errors import LaunchError
from hvdlite.core.world import World


@dataclasses.dataclass(frozen=True)
class Environment:
    """The variables in which one kind of launcher tells a rank its place."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]  # together they tell this job from any other of this user on this host


ENVIRONMENTS = (
    Environment("hvdlite", contract.RANK, contract.SIZE, contract.LOCAL_RANK, contract.LOCAL_SIZE,
                (contract.JOB_DIRECTORY,)),
    Environment("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                ("TORCHELASTIC_RUN_ID", "MASTER_PORT")),
    Environment("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    Environment("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_PORT",)),
    Environment("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
                ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)


@dataclasses.dataclass(frozen=True)
class Place:
    """What a rank knows before it has met the others."""

    environment: str
    world: World
    job_directory: str = ""  # where ranks of this host meet; empty when alone
    coordinator: tuple[str, int] | None = None
    key: bytes = dataclasses.field(default=b"", repr=False)
    owns_directory: bool = False  # nobody else will remove it


def find_place(environ: Mapping[str, str], parent: int) -> Place:
    """Read a rank's place from its environment.

    Args:
        parent: the parent's process id; marks the job when the launcher's variables do not, because the ranks that one
            launcher started on this host share it.

    Raises:
        LaunchError: when a launcher's variables are incomplete or contradict each other.
    """
    for environment in ENVIRONMENTS:
        if environment.size in environ or environment.rank in environ:
            return _place(environment, environ, parent)
    return Place("none", World())


def _place(environment: Environment, environ: Mapping[str, str], parent: int) -> Place:
    world = _world(environment, environ)
    secret = environ.get(contract.SECRET, "")
    try:
        key = bytes.fromhex(secret)
    except ValueError:
        raise LaunchError(f"{contract.SECRET} is not a hexadecimal number") from None
    coordinator = _host_and_port(environ[contract.COORDINATOR]) if contract.COORDINATOR in environ else None
    if world.size == 1:
        return Place(environment.name, world, environ.get(contract.JOB_DIRECTORY, ""))
    if world.local_size < world.size:
        raise LaunchError(f"{environment.name}: {world.size} ranks on several hosts ({world.local_size} here): this version "
                          "has no data plane between hosts yet; start all ranks on one host")
    given = environ.get(contract.JOB_DIRECTORY)
    directory = given or _agreed_directory(environment, environ, parent)
    return Place(environment.name, world, directory, coordinator, key, owns_directory=not given)


def _world(environment: Environment, environ: Mapping[str, str]) -> World:
    rank = _number(environ, environment.rank, environment)
    size = _number(environ, environment.size, environment)
    local_rank = _number(environ, environment.local_rank, environment, default=rank)
    local_size = _number(environ, environment.local_size, environment, default=size)
    cross = contract if environment.name == "hvdlite" else None
    return World(rank, size, local_rank, local_size,
                 _number(environ, cross.CROSS_RANK, environment, default=0) if cross else 0,
                 _number(environ, cross.CROSS_SIZE, environment, default=1) if cross else 1)


def _number(environ: Mapping[str, str], variable: str, environment: Environment, default: int | None = None) -> int:
    text = environ.get(variable)
    if text is None:
        if default is None:
            raise LaunchError(f"the environment looks like {environment.name}'s, but {variable} is not set; "
                              f"environments are tried in this order: {', '.join(row.name for row in ENVIRONMENTS)}")
        return default
    try:
        return int(text.split("(")[0])  # Slurm writes "4(x2)" for several nodes
    except ValueError:
        raise LaunchError(f"{variable}={text!r} is not a number") from None


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"{contract.COORDINATOR}={text!r} is not host:port")
    return host.strip("[]"), int(port)


def _agreed_directory(environment: Environment, environ: Mapping[str, str], parent: int) -> str:
    """Make the directory that all ranks of this job derive from what they have in common."""
    marks = [environ.get(variable, "") for variable in environment.job]
    if not any(marks):
        marks = [str(parent)]
    digest = hashlib.sha256("|".join([environment.name, *marks]).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"hvdlite-{os.geteuid()}-{digest}"
    path.mkdir(mode=0o700, exist_ok=True)
    return str(path)


def check_directory(path: str) -> None:
    """Raise `LaunchError` unless `path` is a directory that only this user can enter."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise LaunchError(f"{contract.JOB_DIRECTORY}={path}: {error.strerror}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise LaunchError(f"{path} must belong to user {os.geteuid()} and have mode 0700, because whoever can enter it can "
                          f"talk to the job (owner {status.st_uid}, mode {status.st_mode & 0o777:04o})")
