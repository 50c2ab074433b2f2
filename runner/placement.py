"""The hosts of the user or a scheduler, and the placement of ranks on them. Pure, except `is_local`: it asks the resolver.

`SCHEDULERS` is the table of the schedulers whose allocations are found in the environment.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from hvdlite.core import launch_contract as contract
from hvdlite.core.errors import LaunchError

LOCAL = "localhost"
"""The name of the launcher's own host."""
LOCAL_NAMES = frozenset({LOCAL, "127.0.0.1", "::1"})
MOST_SLOTS = 1 << 20
"""Slots of a host, and ranks of a job, that are accepted: more are a mistake."""
_DIGITS = 20


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine and its number of slots for ranks."""

    name: str  # as for ssh: user@name is possible, and an IPv6 address has no brackets
    slots: int = 1

    @property
    def address(self) -> str:
        """The name or address without a user."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of `a:2,user@b:4,[fd00::2]:1`; the default is one slot, and a repeated host has the sum.

    Raises:
        LaunchError: for an empty list or a number of slots that is not positive.
    """
    hosts = merged(_host(part) for part in filter(None, (piece.strip() for piece in text.split(","))))
    if not hosts:
        raise LaunchError("the list of hosts is empty")
    return hosts


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Return the hosts of a file: a line each, `name slots=2` (Open MPI, Horovod), `name:2` (MPICH) or `name`; # comments.

    Raises:
        LaunchError: with the line that has another form.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        unknown = [word for word in words[1:] if not re.fullmatch(r"(max[_-])?slots=\d+", word)]
        try:
            if unknown:
                raise LaunchError(f"{unknown[0]!r} is not slots=N")
            bare = words[0].count(":") > 1 and not words[0].startswith("[")  # an IPv6 address
            hosts.append(_host(f"[{words[0].strip('[]')}]:{slots[0] if slots else 1}" if slots or bare else words[0]))
        except LaunchError as error:
            raise LaunchError(f"{path}, line {number}: {error}") from None
    if not hosts:
        raise LaunchError(f"{path} names no host")
    return merged(hosts)


def merged(hosts: Iterable[Host]) -> list[Host]:
    """Return each host once, with all its slots, in the order of first mention."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


def _host(text: str) -> Host:
    name, slots = parse_host(text)
    if slots == 0:
        raise LaunchError(f"{name} has no slots")
    return Host(name, 1 if slots is None else slots)


def parse_host(text: str) -> tuple[str, int | None]:
    """Return the name of a host and its slots, None if `text` has none.

    Raises:
        LaunchError: for another form.
    """
    match = re.fullmatch(r"(?P<user>[\w.-]+@)?(?:\[(?P<quoted>[^][\s]+)\]|(?P<name>[^][:\s@]+))"
                         r"(?::(?P<slots>[0-9]+))?", text)
    if match is None:
        raise LaunchError(f"{text!r} is not host:slots (such as localhost:4, or [fd00::2]:4 for an IPv6 address)")
    name = (match["user"] or "") + (match["quoted"] or match["name"])
    if name.startswith("-"):
        raise LaunchError(f"{text!r} is not the name of a host")
    digits = match["slots"]
    if digits is not None and (len(digits) > _DIGITS or int(digits) > MOST_SLOTS):
        shown = digits if len(digits) <= _DIGITS else f"{digits[:_DIGITS]}..."
        raise LaunchError(f"{name} cannot have {shown} slots; at most {MOST_SLOTS:,}")
    return name, None if digits is None else int(digits)


def assign_slots(size: int | None, hosts: Sequence[Host]) -> dict[str, int]:
    """Fill the hosts' slots in order; return the slots of each host that are filled, without hosts that have none.

    Args:
        size: the number of ranks; None for one on each slot.

    Raises:
        LaunchError: when there are fewer slots than ranks.
    """
    count = sum(host.slots for host in hosts)
    if size is not None and size > count:
        offered = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(f"-np {size} is more than the {count} slots of {offered}")
    if (size or count) > MOST_SLOTS:
        raise LaunchError(f"the hosts have {count:,} slots, and a job at most {MOST_SLOTS:,} ranks: pass -np N")
    left, filled = size or count, {}
    for host in hosts:
        taken = min(left, host.slots)
        left -= taken
        if taken:
            filled[host.name] = taken
    return filled


def rename_local_hosts(hosts: Sequence[Host], local: Callable[[str], bool]) -> list[Host]:
    """Return the hosts with every name of this machine replaced by `LOCAL`, so that its ranks share a host."""
    return merged(Host(LOCAL, host.slots) if local(host.name) else host for host in hosts)


def is_local(name: str) -> bool:
    """Return whether a name or address is this machine's: whether a socket can listen there."""
    if "@" in name:
        return False  # another user's processes need a remote shell
    if name in LOCAL_NAMES or name == socket.gethostname():
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # the remote shell may know the name, and reports an error otherwise
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def cores_for(rank: int, size: int, cores: list[int]) -> list[int]:
    """Return the cores that `rank` is bound to: an equal share, or one core in turn when there are too few."""
    share = len(cores) // size
    return cores[rank * share:(rank + 1) * share] if share else [cores[rank % len(cores)]]


def check_is_alone(environ: Mapping[str, str], command: Sequence[str], np: int | None = None) -> None:
    """Refuse a job that would be started in each of several tasks: all would train, and write the same files.

    A rank that has joined its own job may start others.

    Args:
        command: of the job.
        np: the number of its ranks, if the user has given one.

    Raises:
        LaunchError: with the command that starts one job.
    """
    words = shlex.join(command)
    for launcher, rank, size, instead in (
            ("hvdrun", contract.RANK, contract.SIZE, ""),
            ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
             f" in the script of sbatch or the shell of salloc, or srun {words} without hvdrun. "
             "A shell of srun --pty has one task with srun -n1 --pty")):
        if rank in environ and environ.get(size, "1") != "1" and not (launcher == "hvdrun" and contract.JOINED in environ):
            raise LaunchError(f"{launcher} runs this hvdrun {environ[size]} times, here as number {environ[rank]}, and each "
                              "would start a training of its own. Run one: "
                              f"hvdrun -np {np or environ[size]} {words}{instead}. If you want them all, or "
                              f"{rank} and {size} are left over from another job, unset {size}")


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: 0-3,5."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


Read = Callable[[str], str]
"""Returns a file's text."""


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The allocation of a scheduler."""

    scheduler: str
    hosts: list[Host]
    shell: str = "ssh"  # the way to reach its hosts


@dataclasses.dataclass(frozen=True)
class _Scheduler:
    name: str
    variable: str  # the environment variable that identifies it
    hosts: Callable[[Mapping[str, str], Read], list[Host]]
    shell: str = "ssh"


def find_allocation(environ: Mapping[str, str], read: Read) -> Allocation | None:
    """Return the allocation that this process runs in, or None.

    Raises:
        LaunchError: when the scheduler's variables are invalid.
    """
    for scheduler in SCHEDULERS:
        if scheduler.variable in environ:
            try:
                hosts = scheduler.hosts(environ, read)
            except (KeyError, ValueError, OSError) as error:
                raise LaunchError(f"this seems to be an allocation of {scheduler.name} ({scheduler.variable} is set), but "
                                  f"its hosts cannot be determined: {error!r}; list them with -H") from None
            program = environ["OMPI_MCA_plm_rsh_agent"] if scheduler.shell == "rsh agent" else scheduler.shell
            return Allocation(scheduler.name, hosts, program)
    return None


def _slurm(environ: Mapping[str, str], read: Read) -> list[Host]:
    names = expand_nodes(environ["SLURM_JOB_NODELIST"])
    each = environ.get("SLURM_TASKS_PER_NODE") or environ["SLURM_JOB_CPUS_PER_NODE"]
    return [Host(name, count) for name, count in zip(names, repeat_counts(each, len(names)), strict=True)]


def expand_nodes(text: str) -> list[str]:
    """Return the names of Slurm's `gpu[01-03,7],login`: each bracket is a list of numbers and spans of one width."""
    names = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = [_span(part[1:-1]) if part.startswith("[") else [part] for part in re.findall(r"\[[^\]]*\]|[^\[]+", item)]
        names += ["".join(choice) for choice in itertools.product(*parts)]
    return names


def _span(text: str) -> list[str]:
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found


def repeat_counts(text: str, nodes: int) -> list[int]:
    """Return the numbers of Slurm's `4(x2),1` (as many as there are nodes)."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of counts")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != nodes:
        raise ValueError(f"{text!r} counts {len(counts)} nodes, not {nodes}")
    return counts


def _lsf(environ: Mapping[str, str], read: Read) -> list[Host]:
    """Return the hosts of `LSB_MCPU_HOSTS` ("batch 1 node1 4 node2 4"), without a first host that only runs the script."""
    words = environ["LSB_MCPU_HOSTS"].split()
    hosts = [Host(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True)]
    launches_only = len(hosts) > 1 and hosts[0].slots == 1 and all(host.slots > 1 for host in hosts[1:])
    return hosts[1:] if launches_only else hosts


def _pbs(environ: Mapping[str, str], read: Read) -> list[Host]:
    return merged(Host(line.strip()) for line in read(environ["PBS_NODEFILE"]).splitlines() if line.strip())


def _grid_engine(environ: Mapping[str, str], read: Read) -> list[Host]:
    rows = [line.split() for line in read(environ["PE_HOSTFILE"]).splitlines() if line.strip()]
    return merged(Host(row[0], int(row[1])) for row in rows)


def _kubeflow(environ: Mapping[str, str], read: Read) -> list[Host]:
    path = environ["OMPI_MCA_orte_default_hostfile"]
    return parse_hostfile(read(path), path)


SCHEDULERS: Final = (
    _Scheduler("Kubeflow's MPI operator", "OMPI_MCA_orte_default_hostfile", _kubeflow, "rsh agent"),
    _Scheduler("Slurm", "SLURM_JOB_NODELIST", _slurm, "srun"),
    _Scheduler("LSF", "LSB_MCPU_HOSTS", _lsf, "blaunch"),
    _Scheduler("PBS", "PBS_NODEFILE", _pbs),
    _Scheduler("Grid Engine", "PE_HOSTFILE", _grid_engine),
)
