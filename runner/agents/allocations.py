"""The hosts and slots of a scheduler's allocation: a table with a row per scheduler. Pure: environment in, hosts out."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Final

from hvdlite.core.errors import LaunchError
from hvdlite_runner.placement import Host, merged, parse_hostfile

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
