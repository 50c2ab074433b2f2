"""What the user wants of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hvdlite.membership.events import Limits
from hvdlite_runner import placement
from hvdlite_runner.agents.remote_agent import Shell
from hvdlite_runner.output.console import OutputSettings
from hvdlite_runner.placement import LOCAL


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """The command of a job, its hosts and ranks.

    Attributes:
        limits: how many ranks there are; `one_world` for a job that is not elastic.
        slots: of each host, in the order of ranks; empty with a script. A job that is not elastic has a rank for each slot,
            and calls the launcher's own host `LOCAL`; an elastic one may have several names for it.
        script: the program that discovers the hosts of an elastic job.
        slots_per_host: of a host for which that program prints none.
        preemption_script: a program that says on each host of an elastic job when this will be taken away; "" for none.
        node_name: the scheduler's name of this machine, which may not be a network name.
        environment: added to the inherited environment.
        working_directory: on other hosts; "" for the launcher's.
        start_timeout: seconds for an agent to start.
        grace: seconds between the user's signal and SIGKILL; None for the defaults.
        coordinator_port: where rank 0 listens; 0 for any.
        over_tcp: whether ranks of one host use TCP among themselves too.
        share_cores: among how many ranks at least each host's cores are divided, for OMP_NUM_THREADS; 0: it is not set.
        has_input: whether rank 0, on the launcher's own host, gets the launcher's standard input.
        task_directory: of `hvdlite.run`: a function for the ranks, and the folder for its results.
        notice: notes for the user, printed once.
    """

    command: Sequence[str]
    limits: Limits
    slots: Mapping[str, int]
    script: str | None = None
    slots_per_host: int = 1
    node_name: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shell: Shell = dataclasses.field(default_factory=Shell)
    working_directory: str = ""
    start_timeout: float = 60.0
    grace: float | None = None
    interfaces: Sequence[str] = ()
    coordinator_port: int = 0
    over_tcp: bool = False
    share_cores: int = 1
    output: OutputSettings = dataclasses.field(default_factory=OutputSettings)
    bind: bool = False
    has_input: bool = False
    verbose: bool = False
    task_directory: str | None = None
    preemption_script: str = ""
    notice: str = ""

    def is_local(self, name: str) -> bool:
        """Return whether the name of a host means this machine; asks the resolver, unless the names have been resolved."""
        if self.limits.one_world:
            return name == LOCAL
        return name == self.node_name or placement.is_local(name)
