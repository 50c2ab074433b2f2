"""`hvdrun --mpi`: the command line of an MPI library's launcher. Pure, except `flavour_of`.

The command line contains only the names of variables, never their values, which Open MPI and MPICH forward themselves.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from hvdlite.core.errors import LaunchError
from hvdlite_runner.agents.remote_agent import forwarded
from hvdlite_runner.placement import Host

OPEN_MPI, MPICH, INTEL = "Open MPI", "MPICH", "Intel MPI"
_LARGE: Final = 64
"""The number of hosts from which Open MPI should start its daemons without a tree."""


def flavour_of(program: str) -> str:
    """Return the MPI library that a launcher belongs to.

    Raises:
        LaunchError: when the launcher does not exist, or its library is unknown.
    """
    try:
        asked = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=20)
    except OSError as error:
        raise LaunchError(f"--mpi needs {program}, which cannot be started: {error.strerror}; install an MPI library "
                          "(Debian: openmpi-bin or mpich; or: pip install mpich), or leave --mpi out") from None
    output = asked.stdout + asked.stderr
    for sign, flavour in (("Open MPI", OPEN_MPI), ("OpenRTE", OPEN_MPI), ("PRTE", OPEN_MPI), ("Intel", INTEL),
                          ("HYDRA", MPICH)):
        if sign in output:
            return flavour
    raise LaunchError(f"{program} is not a launcher of Open MPI, MPICH or Intel MPI; its output: "
                      f"{output.strip().splitlines()[:1]}")


def mpirun_command(flavour: str, program: str, size: int, hosts: Sequence[Host], environ: Mapping[str, str],
                   command: Sequence[str], *, arguments: Sequence[str] = (), binding: Sequence[str] = (),
                   ssh: Sequence[str] = (), interfaces: Sequence[str] = (), root: bool = False,
                   output_directory: str | None = None, prefix: bool = True, grace: float | None = None) -> list[str]:
    """Return the command line of an MPI launcher.

    Args:
        hosts: empty for this host only.
        environ: the ranks' environment; only the names of variables to forward are used.
        arguments: the user's; they follow hvdlite's own.
        binding: arguments for binding, instead of hvdlite's (none).
        ssh: arguments for ssh.
        root: whether the user is root, which Open MPI only allows with an option.
        grace: seconds between SIGTERM and SIGKILL; None for what the launcher does by itself. Open MPI 4 kills after one
            second, and Open MPI 5 at once, whatever it is told; MPICH and Intel MPI wait.
    """
    build = _open_mpi if flavour == OPEN_MPI else _hydra
    if flavour == OPEN_MPI and grace is not None:
        arguments = ["-mca", "odls_base_sigkill_timeout", f"{math.ceil(grace)}", *arguments]
    return [program, *build(size, hosts, sorted(forwarded(environ)), binding, ssh, interfaces, root, output_directory,
                            prefix, flavour), *arguments, *command]


def _open_mpi(size: int, hosts: Sequence[Host], names: Sequence[str], binding: Sequence[str], ssh: Sequence[str],
              interfaces: Sequence[str], root: bool, output_directory: str | None, prefix: bool, flavour: str) -> list[str]:
    words = ["--allow-run-as-root"] if root else []
    words += ["--tag-output"] if prefix else []
    words += ["-np", str(size)]
    if hosts:
        words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    else:
        words += ["--oversubscribe"]  # more ranks than cores are allowed, as without --mpi
    words += list(binding) or ["-bind-to", "none", "-map-by", "slot"]
    if len(hosts) >= _LARGE:
        words += ["-mca", "plm_rsh_no_tree_spawn", "true", "-mca", "plm_rsh_num_concurrent", str(len(hosts))]
    if ssh:
        words += ["-mca", "plm_rsh_args", " ".join(ssh)]
    if interfaces:
        words += ["-mca", "btl_tcp_if_include", ",".join(interfaces), "-mca", "oob_tcp_if_include", ",".join(interfaces)]
    if output_directory is not None:
        words += ["--output-filename", output_directory]
    return [*words, *(word for name in names for word in ("-x", name))]


def _hydra(size: int, hosts: Sequence[Host], names: Sequence[str], binding: Sequence[str], ssh: Sequence[str],
           interfaces: Sequence[str], root: bool, output_directory: str | None, prefix: bool, flavour: str) -> list[str]:
    if ssh:
        raise LaunchError(f"{flavour}'s launcher does not accept arguments for ssh ({' '.join(ssh)}); put them into "
                          "~/.ssh/config")
    words = ["-np", str(size)]
    if hosts:
        words += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    words += list(binding)
    if interfaces:
        words += ["-iface", interfaces[0]]
    if output_directory is not None:
        words += ["-outfile-pattern", f"{output_directory}/rank.%r.stdout", "-errfile-pattern",
                  f"{output_directory}/rank.%r.stderr"]
    words += ["-prepend-rank" if flavour == MPICH else "-l"] if prefix else []
    return [*words, "-genvlist", ",".join(names)]
