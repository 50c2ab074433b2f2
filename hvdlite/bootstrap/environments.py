"""Launch environments: the table of the variables that each launcher sets; the first row whose variables are set applies.

| row | set by | across hosts |
|---|---|---|
| hvdlite | hvdrun, or the user | the launcher sets the coordinator and the key |
| Kubernetes | an indexed job sets the pod's index, the manifest the rest (see below) | coordinator and key in the manifest |
| torchrun, Slurm | their launchers | `HVDLITE_SECRET` or `HVDLITE_SECRET_FILE` is required; rank 0's host is known |
| Open MPI, MPICH and derivatives | mpirun, mpiexec, srun | coordinator and key come over MPI; see `launch_info.py` |
| jsrun | its launcher (LSF) | coordinator and key must be set |
| none | no launcher: the script runs alone, with size 1 | |

In an indexed job of Kubernetes each pod is a rank: `JOB_COMPLETION_INDEX` is the rank; the manifest sets `HVDLITE_SIZE` to
`completions`, `HVDLITE_COORDINATOR` to the first pod's name and a port, and `HVDLITE_SECRET` from a secret.

The job's key leaves the environment when a process joins its job (`JobKey`): children, core dumps and loggers do not get it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import hmac
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from hvdlite.bootstrap.job_directory import agreed_prefix
from hvdlite.core import launch_contract as contract
from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import COORDINATOR, JOB_DIRECTORY, SECRET, SECRET_TAKEN
from hvdlite.core.sockets import HeldPort, loopback
from hvdlite.core.world import World

PORTS: Final = range(20_000, 32_000)
"""Ports on which rank 0 listens by default; they lie below the system's ephemeral ports."""
LEAST_KEY_BYTES: Final = 16
MAKE_A_KEY: Final = "make one with: python -c 'import secrets; print(secrets.token_hex())'"


@dataclasses.dataclass(frozen=True)
class Environment:
    """The environment variables by which one kind of launcher describes a rank."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]  # together they identify the job among this user's jobs on this host
    first_host: tuple[str, ...] = ()  # the first one that is set names rank 0's host, or a list that begins with it
    is_mpi: bool = False  # the remaining information is exchanged over MPI

    def rank_0_host(self, environ: Mapping[str, str]) -> str:
        """Return the name of rank 0's host; "" if it is not known."""
        return first_host(next((environ[variable] for variable in self.first_host if environ.get(variable)), ""))

    def port(self, environ: Mapping[str, str], common: str = "") -> int:
        """Return a port that the ranks of a job derive from its ids, or from `common` without such."""
        ids = [environ.get(variable, "") for variable in self.job]
        text = "|".join([self.name, *(ids if any(ids) else [common])])
        return PORTS[int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % len(PORTS)]


ENVIRONMENTS = (
    Environment("hvdlite", contract.RANK, contract.SIZE, contract.LOCAL_RANK, contract.LOCAL_SIZE,
                (contract.JOB_DIRECTORY,)),
    Environment("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                ("TORCHELASTIC_RUN_ID", "MASTER_PORT"), ("MASTER_ADDR",)),
    Environment("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",), is_mpi=True),
    Environment("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_PORT",), is_mpi=True),
    Environment("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE",
                ("LSB_JOBID", "PMIX_NAMESPACE")),
    Environment("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
                ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("SLURM_STEP_NODELIST", "SLURM_NODELIST")),
)


@dataclasses.dataclass(frozen=True)
class LaunchInfo:
    """The information about a rank that is available before the rendezvous."""

    environment: str
    world: World
    job_directory: str = ""  # where the ranks of this host meet: see `JobDirectory`; empty for size 1
    coordinator: tuple[str, int] | None = None  # host and port where rank 0 of the first world listens
    key: bytes = dataclasses.field(default=b"", repr=False)
    owns_directory: bool = False  # the ranks make and find the directory themselves: `job_directory` is a prefix
    is_mpi: bool = False  # an MPI launcher started the rank
    knows_local_ranks: bool = True  # false: the ranks of this host must be determined over MPI
    communicator: Any = dataclasses.field(default=None, repr=False)  # an MPI communicator of all ranks, owned by the job
    coordinator_port: int = 0  # elastic jobs: where rank 0 of later worlds listens; 0: at any free port
    held_port: HeldPort | None = dataclasses.field(default=None, repr=False)  # on rank 0: where it will listen
    mpi_problem: str = ""  # why there is no communicator, although one was wanted
    how_to_have_a_key: str = ""  # for ranks that need one and have none
    rank_names: tuple[str, ...] = ()  # in errors, where the ranks of this world have other numbers elsewhere
    identity: str = ""  # the launcher's ids of the job, or the id of a world whose ranks have met in a store
    variables: tuple[str, ...] = ()  # NAME=value of rank and size, unless hvdrun has given them

    @property
    def job(self) -> str:
        """What tells this job from others: equal on all its ranks. A job on several hosts has a key."""
        secret = self.key or os.fsencode(self.job_directory)
        return hmac.digest(secret, f"job {self.identity}".encode(), "sha256").hex()[:32]

    @property
    def is_complete(self) -> bool:
        """Whether hvdrun, or a launcher that sets the same variables, has provided all information."""
        return self.environment == "hvdlite"

    @property
    def on_several_hosts(self) -> bool:
        """Whether the job has ranks on other hosts."""
        return self.world.local_size < self.world.size


def read_launch_info(environ: Mapping[str, str], parent: int) -> LaunchInfo:
    """Read a rank's launch information from its environment.

    Args:
        parent: the parent's process id. It identifies the job when the launcher's variables do not, because all ranks that
            a launcher starts on this host have the same parent.

    Raises:
        LaunchError: when a launcher's variables are incomplete or contradict each other.
    """
    environ = _with_pod_variables(environ)
    for environment in ENVIRONMENTS:
        if _applies(environment, environ):
            return _launch_info(environment, environ, parent)
    if "PMIX_RANK" in environ:
        raise LaunchError(f"a PMIx launcher started this process as rank {environ['PMIX_RANK']}, but the number of ranks is "
                          f"not in the environment: set {contract.SIZE} too, and {contract.RANK}=$PMIX_RANK")
    return LaunchInfo("none", World())


def _with_pod_variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with the rank of a pod of an indexed job, unless a launcher in the pod has set a rank."""
    if "JOB_COMPLETION_INDEX" not in environ or contract.SIZE not in environ or contract.RANK in environ:
        return environ
    index = environ["JOB_COMPLETION_INDEX"]
    return {contract.LOCAL_RANK: "0", contract.LOCAL_SIZE: "1", contract.CROSS_RANK: index,
            contract.CROSS_SIZE: environ[contract.SIZE], **environ, contract.RANK: index}


def _applies(environment: Environment, environ: Mapping[str, str]) -> bool:
    """Return whether a launcher's variables are set, and describe this process.

    A Slurm batch script is not a task of a step, although SLURM_PROCID is set. Where srun sets MPI's variables
    (`--mpi=pmi2`, `pmix`), its own variables provide more information: which ranks share a node.
    """
    if environment.name == "Slurm":
        return environment.size in environ
    if environment.is_mpi and environment.local_rank not in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return False
    return environment.size in environ or environment.rank in environ


def _launch_info(environment: Environment, environ: Mapping[str, str], parent: int) -> LaunchInfo:
    is_mpi = any(row.is_mpi and row.size in environ for row in ENVIRONMENTS)  # hvdrun may have used it
    environment = _with_slurms_local_rank(environment, environ)
    world = _world(environment, environ)
    key = job_key(environ)
    if world.epoch and key:  # each world of an elastic job has its own: a frame of another world is not authentic in it
        key = hmac.digest(key, f"epoch {world.epoch}".encode(), "sha256")
    coordinator = _host_and_port(environ[contract.COORDINATOR]) if contract.COORDINATOR in environ else None
    if world.size == 1:
        return LaunchInfo(environment.name, world, environ.get(contract.JOB_DIRECTORY, ""), is_mpi=is_mpi)
    if world.local_size < world.size and not environment.is_mpi:
        if world.epoch <= 1 and contract.JOINER not in environ:  # in later worlds rank 0 announces where it listens
            coordinator = coordinator or _likely_coordinator(environment, environ)
        if not key:
            raise LaunchError(f"{environment.name}: {world.size} ranks on several hosts ({world.local_size} here) need the "
                              f"job's key, so that no other program can connect to them: {how_to_have_a_key(environ)}")
    given = environ.get(contract.JOB_DIRECTORY)
    directory = given or _agreed_prefix(environment, environ, parent, key)
    of_job = () if environment.name == "hvdlite" or environment.is_mpi else environment.job  # these differ between hosts
    ids = "|".join(environ.get(variable, "") for variable in of_job)
    return LaunchInfo(environment.name, world, directory, coordinator, key, not given, is_mpi,
                      not is_mpi or environment.local_rank in environ,
                      coordinator_port=_number(environ, contract.COORDINATOR_PORT, environment, default=0),
                      how_to_have_a_key=how_to_have_a_key(environ), identity=ids,
                      variables=() if given else tuple(f"{name}={environ[name]}"
                                                   for name in (environment.rank, environment.size)))


def torch_variables(environ: Mapping[str, str], parent: int) -> dict[str, str]:
    """Return the variables by which `torch.distributed` (env://) finds the ranks, from those of another launcher.

    Args:
        environ: of this rank.
        parent: as for `read_launch_info`.

    Returns:
        The variables that are not set; none of them if torch's launcher, or hvdrun, has set RANK. MASTER_PORT is derived
        from the job's ids, and nothing keeps other programs off it.

    Raises:
        LaunchError: when no launcher has started this process, or its variables do not name rank 0's host.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return {}
    environment = next((each for each in ENVIRONMENTS if _applies(each, environ)), None)
    if environment is None:
        raise LaunchError("no launcher that is known has started this process: set RANK, WORLD_SIZE, MASTER_ADDR and "
                          "MASTER_PORT, or start it with hvdrun, torchrun, mpirun or srun")
    environment = _with_slurms_local_rank(environment, environ)
    world = _world(environment, environ)
    if "MASTER_ADDR" in environ:
        first = environ["MASTER_ADDR"]
    elif world.local_size == world.size:  # the host's name may lead nowhere
        first = loopback() or "127.0.0.1"
    elif not (first := environment.rank_0_host(environ)):
        raise LaunchError(f"{environment.name}: the ranks are on several hosts, and the address of rank 0 is not known: set "
                          "MASTER_ADDR, the same on all ranks")
    found = contract.torch_environment(world, first_host(first), environment.port(environ, str(parent)))
    return {name: value for name, value in found.items() if name not in environ}


def check_host(name: str) -> None:
    """Check that a host's name has an address here; "" is no host.

    Raises:
        LaunchError: when it has none.
    """
    try:
        socket.getaddrinfo(name, None) if name else None
    except OSError as error:
        raise LaunchError(f"{name}, the host of rank 0, has no address on this host ({error.strerror}): set MASTER_ADDR, "
                          "the same on all ranks") from error


def _with_slurms_local_rank(environment: Environment, environ: Mapping[str, str]) -> Environment:
    """Return an MPI environment that has its local ranks from srun (`--mpi=pmi2`)."""
    if environment.is_mpi and environment.local_rank not in environ and "SLURM_LOCALID" in environ:
        return dataclasses.replace(environment, local_rank="SLURM_LOCALID", local_size="SLURM_STEP_TASKS_PER_NODE")
    return environment


def _world(environment: Environment, environ: Mapping[str, str]) -> World:
    rank = _number(environ, environment.rank, environment)
    size = _number(environ, environment.size, environment)
    local_rank = _number(environ, environment.local_rank, environment, default=rank)
    local_size = _number(environ, environment.local_size, environment, default=size)
    cross = contract if environment.name == "hvdlite" else None
    return World(rank, size, local_rank, local_size,
                 _number(environ, cross.CROSS_RANK, environment, default=0) if cross else 0,
                 _number(environ, cross.CROSS_SIZE, environment, default=1) if cross else 1,
                 _number(environ, contract.EPOCH, environment, default=1) if contract.MEMBER in environ else 0)


def _number(environ: Mapping[str, str], variable: str, environment: Environment, default: int | None = None) -> int:
    text = environ.get(variable)
    if text is None:
        if default is None:
            raise LaunchError(f"the environment seems to be {environment.name}'s, but {variable} is not set; "
                              f"environments are tried in this order: {', '.join(row.name for row in ENVIRONMENTS)}")
        return default
    try:
        return int(tasks_of_node(text, environ.get("SLURM_NODEID", "0")))
    except ValueError:
        raise LaunchError(f"{variable}={text!r} is not a number") from None


def tasks_of_node(text: str, node: str) -> str:
    """Return a node's entry in Slurm's list of tasks per node, as in "2(x3),1"; any other text is returned as it is."""
    counts: list[str] = []
    for entry in text.split(","):
        count, _, repeat = entry.rstrip(")").partition("(x")
        counts += [count] * int(repeat or 1)
    return counts[int(node)] if int(node) < len(counts) else counts[0]


def job_key(environ: Mapping[str, str]) -> bytes:
    """Return the job's key as the environment gives it; empty without one.

    Raises:
        LaunchError: for one that cannot be used.
    """
    secret, source = environ.get(contract.SECRET, ""), contract.SECRET
    if not secret and (path := environ.get(contract.SECRET_FILE)):
        source = f"{contract.SECRET_FILE}={path}"
        try:
            if os.stat(path).st_mode & 0o077:
                raise LaunchError(f"{source}: other users can read it; chmod 600 {path} (a secret that Kubernetes mounts "
                                  "has mode 0644: set 'defaultMode: 0400' in the volume's 'secret', without an 'fsGroup')")
            secret = Path(path).read_text(encoding="ascii").strip()
        except OSError as error:
            raise LaunchError(f"{source}: {error.strerror}") from None
    try:
        key = bytes.fromhex(secret)
    except ValueError:
        raise LaunchError(f"{source} is not a hexadecimal number; {MAKE_A_KEY}") from None
    if secret and len(key) < LEAST_KEY_BYTES:
        raise LaunchError(f"{source} has {len(key)} bytes, and could be guessed: at least {LEAST_KEY_BYTES} are needed; "
                          f"{MAKE_A_KEY}")
    return key


def how_to_have_a_key(environ: Mapping[str, str]) -> str:
    """Return the end of an error's text: what a rank without the job's key can do."""
    taker = environ.get(contract.SECRET_TAKEN)
    if taker is None:
        return f"set {contract.SECRET} (or {contract.SECRET_FILE}) to the same value on all ranks; {MAKE_A_KEY}"
    return (f"process {taker}, from which this one has its environment, has taken the key out of it in init(), so that its "
            f"children do not have it. Call init() in process {taker} only; or let it read {contract.SECRET} before its "
            f"init(), and set it for this process")


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise LaunchError(f"{contract.COORDINATOR}={text!r} is not host:port, with a port of at most 65535")
    return host.strip("[]"), int(port)


def _likely_coordinator(environment: Environment, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the address at which all ranks expect rank 0: the job's first host, and a port derived from the job's ids."""
    host = environment.rank_0_host(environ)
    if not host:
        raise LaunchError(f"{environment.name}: the ranks are on several hosts, and the address of rank 0 is not known: set "
                          f"{contract.COORDINATOR} to its host:port, the same on all ranks")
    return host, environment.port(environ)


def first_host(text: str) -> str:
    """Return the first of a list of hosts as Slurm writes it: "node[03-04,7],gpu1" begins with node03."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", text)[0])


def _agreed_prefix(environment: Environment, environ: Mapping[str, str], parent: int, key: bytes) -> str:
    """Return the beginning of the job directory's path, from what is equal on all ranks of this host."""
    ids = [environ.get(variable, "") for variable in environment.job]
    more = [environ.get(variable, "") for variable in environment.first_host]
    own = hmac.digest(key, b"directory", "sha256").hex() if key else ""
    return agreed_prefix(environment.name, *(ids if any(ids) else [str(parent)]), *more, own)


_JOB = (JOB_DIRECTORY, COORDINATOR)


class JobKey:
    """Keeps the key for the further worlds of the process, and for `init()` after `shutdown()`.

    Args:
        environ: the process's environment.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._kept: dict[str, str] = {}
        self._job: list[str | None] = []  # whose key it is

    def environment(self) -> Mapping[str, str]:
        """Return the environment as it was when it had the key."""
        if SECRET not in self._environ and self._job == self._identity():
            return {**self._environ, **self._kept}
        return self._environ

    def take(self) -> None:
        """Remove the key from the environment, also from what the kernel shows of it (/proc/PID/environ)."""
        if SECRET not in self._environ:
            return
        _overwrite(SECRET, self._environ[SECRET])
        self._kept, self._job = {SECRET: self._environ.pop(SECRET)}, self._identity()
        self._environ[SECRET_TAKEN] = str(os.getpid())

    def _identity(self) -> list[str | None]:
        return [self._environ.get(name) for name in _JOB]


def _overwrite(name: str, value: str) -> None:
    """Overwrite an environment variable with this value where the C library has it: at first, on the process's stack."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address = getenv(name.encode())
    if address and ctypes.string_at(address) == value.encode():
        ctypes.memset(address, ord("0"), len(value.encode()))
