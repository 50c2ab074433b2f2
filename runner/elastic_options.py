"""The options of an elastic job: what the user allows it, and where its hosts come from."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from hvdlite.core.config import MOST_SECONDS, Config
from hvdlite.core.errors import LaunchError
from hvdlite.membership.events import Limits
from hvdlite_runner.discovery import discover_once
from hvdlite_runner.placement import LOCAL, Host, is_local

ELASTIC_ONLY = ("slots_per_host", "elastic_timeout", "reset_limit", "blacklist", "blacklist_cooldown_range")
"""Options that have an effect in elastic jobs only."""


@dataclasses.dataclass(frozen=True)
class ElasticSettings:
    """What makes a job elastic."""

    limits: Limits
    slots: Mapping[str, int]  # the user's hosts; empty with a script
    script: str | None = None  # the program that discovers hosts
    slots_per_host: int = 1  # of a host for which the program prints none
    node_name: str = ""  # the scheduler's name of this machine, which may not be a network name

    def is_local(self, name: str) -> bool:
        """Return whether the name of a host means this machine; asks the resolver."""
        return name == self.node_name or is_local(name)


def is_elastic(options: argparse.Namespace) -> bool:
    """Return whether the options ask for an elastic job."""
    return bool(options.host_discovery_script or options.min_np or options.max_np)


def elastic_settings(options: argparse.Namespace, environ: Mapping[str, str], hosts: Sequence[Host]) -> ElasticSettings:
    """Return the settings of an elastic job.

    Args:
        environ: the environment of its ranks.
        hosts: those that the user or the scheduler has given, if any.

    Raises:
        LaunchError: for options that contradict each other.
    """
    script, least = options.host_discovery_script, options.min_np
    _refuse(options, environ)
    slots = {} if script else {host.name: host.slots for host in hosts}
    size = options.np or least
    if size is None:
        offered = discover_once(script, options.slots_per_host or 1) if script else slots
        size = min(sum(offered.values()), options.max_np or sum(offered.values()))
        if not size:
            raise LaunchError("pass the number of ranks to start with: -np N")
    least = least or size
    if least > size:
        raise LaunchError(f"--min-np {least} is more than -np {size}")
    if options.max_np is not None and options.max_np < size:
        raise LaunchError(f"--max-np {options.max_np} is less than {'-np' if options.np else '--min-np'} {size}")
    if not script and not slots:
        slots = {LOCAL: options.max_np or size}
    if slots and size > sum(slots.values()):
        offered_slots = ",".join(f"{name}:{count}" for name, count in slots.items())
        raise LaunchError(f"-np {size} is more than the {sum(slots.values())} slots of {offered_slots}")
    cooldown = options.blacklist_cooldown_range
    if cooldown is not None and cooldown[0] > cooldown[1]:
        raise LaunchError(f"--blacklist-cooldown-range {cooldown[0]:g} {cooldown[1]:g}: the first number is the smaller one")
    timeout = options.elastic_timeout or _timeout_of(environ)
    rule = options.blacklist or ("host" if options.horovod_compat else "slot")
    limits = Limits(size, least, options.max_np, options.reset_limit, timeout,
                    cooldown=None if cooldown is None else tuple(cooldown), whole_host=rule == "host",
                    hosts_are_fixed=not script)
    return ElasticSettings(limits, slots, script, options.slots_per_host or 1, environ.get("SLURMD_NODENAME", ""))


def _refuse(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Raise an error for what an elastic job cannot do."""
    if options.scaling is not None or options.sweep is not None:
        raise LaunchError("--scaling and --sweep compare jobs of fixed sizes: leave out --min-np, --max-np and "
                          "--host-discovery-script")
    if options.mpi or Config.from_environment(environ).cpu_operations == "mpi":
        what = "--mpi" if options.mpi else "HVDLITE_CPU_OPERATIONS=mpi"
        raise LaunchError(f"{what} excludes elastic training: an MPI job ends when one of its processes ends")


def _timeout_of(environ: Mapping[str, str]) -> float:
    """Return Horovod's variable for `--elastic-timeout`, or the default."""
    text = environ.get("HOROVOD_ELASTIC_TIMEOUT", "")
    try:
        value = float(text or 600)
    except ValueError:
        raise LaunchError(f"HOROVOD_ELASTIC_TIMEOUT={text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise LaunchError(f"HOROVOD_ELASTIC_TIMEOUT={text}: the number of seconds must be above 0 and finite")
    return min(value, MOST_SECONDS)
