"""How a job's processes are started: where, with which variables, and with how many cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hvdlite.core import launch_contract
from hvdlite.core.world import Hosts, World
from hvdlite.membership.events import StartMember
from hvdlite_runner.host import commands
from hvdlite_runner.job.hosts import HostPool
from hvdlite_runner.job.routes import Route, local_route, route_between, route_on
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.messages import ProcessStart, Start
from hvdlite_runner.placement import LOCAL


class Starts:
    """Makes the orders that start processes.

    Args:
        inherited: the launcher's environment.
        key: the job's key.
        note: called with lines for the user.
    """

    def __init__(self, settings: JobSettings, hosts: HostPool, inherited: Mapping[str, str], key: str,
                 note: Callable[[str], None]) -> None:
        self._settings, self._hosts, self._inherited, self._key, self._note = settings, hosts, inherited, key, note
        self._is_elastic = not settings.limits.one_world
        self._route: Route | None = None  # of the founders; keeps their ports

    def orders(self, starting: Sequence[StartMember]) -> dict[str, Start]:
        """Return the order for each machine.

        Raises:
            LaunchError: when the founders' machines cannot reach each other.
        """
        founders = sorted((each for each in starting if not each.is_joiner), key=lambda each: each.rank)
        machines = [self._hosts.machine_of(each.host) for each in founders]
        layout = Hosts.of(machines)
        shared = {**self._settings.environment, **self._rendezvous(list(dict.fromkeys(machines)))}
        if founders and self._settings.share_cores:
            self._note_threads({machine: self._threads(machine) for machine in dict.fromkeys(machines)})
        processes: dict[str, list[ProcessStart]] = {}
        for each, machine in zip(founders, machines, strict=True):
            processes.setdefault(machine, []).append(self._process(each, layout.world(each.rank)))
        for each in starting:
            if each.is_joiner:
                processes.setdefault(self._hosts.machine_of(each.host), []).append(self._process(each, _provisional(each)))
        return {machine: self._order(machine, some, shared) for machine, some in processes.items()}

    def _order(self, machine: str, processes: list[ProcessStart], shared: Mapping[str, str]) -> Start:
        threads = {"OMP_NUM_THREADS": str(self._threads(machine)[0])} if self._settings.share_cores else {}
        return Start(processes, commands.to_bytes(self._settings.command), commands.values_to_bytes({**threads, **shared}),
                     self._is_elastic, has_input=self._settings.has_input and machine == LOCAL)

    def _process(self, each: StartMember, world: World) -> ProcessStart:
        machine = self._hosts.machine_of(each.host)
        own = {launch_contract.HOSTNAME: each.host}
        if self._is_elastic:
            own |= {launch_contract.MEMBER: str(each.member), launch_contract.SLOT: str(each.slot),
                    launch_contract.ELASTIC: "1"}
        if each.is_joiner:
            own[launch_contract.JOINER] = "1"
        share = None
        if self._settings.bind:
            slots = self._hosts.slots_of(machine)
            place = sum(count for name, count in list(slots.items())[:list(slots).index(each.host)]) + each.slot
            share = (place, max(place + 1, sum(slots.values())))
        return ProcessStart(each.member, world, commands.values_to_bytes(own), share)

    def _rendezvous(self, machines: Sequence[str]) -> dict[str, str]:
        """Return the variables with which ranks find and authenticate each other.

        Ranks of one host need the key where they meet through torch's store, and for `hvdlite.run`.

        Args:
            machines: of the founders, if these are started.
        """
        given = {launch_contract.SECRET: self._key}
        settings = self._settings
        if self._is_elastic and settings.coordinator_port:
            given[launch_contract.COORDINATOR_PORT] = str(settings.coordinator_port)
        if len(machines) > 1:
            self._route = route_between(self._hosts, machines, settings.interfaces, settings.coordinator_port)
        elif machines and not self._is_elastic:
            self._route = (local_route(over_tcp=settings.over_tcp) if machines[0] == LOCAL else
                           route_on(self._hosts, machines[0], over_tcp=settings.over_tcp))
        if not machines or self._route is None:
            return given
        if self._route.coordinator:
            given[launch_contract.COORDINATOR] = self._route.coordinator
            if settings.verbose:
                self._note(f"rank 0 listens at {self._route.coordinator}")
        return given if self._is_elastic else {**given, **self._for_torch(*self._route.master)}

    def _for_torch(self, address: str, port: int) -> dict[str, str]:
        """Return where rank 0 has the store by which `torch.distributed` lets ranks meet; what the user has set prevails."""
        stale = commands.another_jobs_torch_variables(self._inherited)
        names = (launch_contract.MASTER_ADDR, launch_contract.MASTER_PORT)
        users = {name: self._inherited[name] for name in names if name in self._inherited and name not in stale}
        return {launch_contract.MASTER_ADDR: address, launch_contract.MASTER_PORT: str(port), **users}

    def _threads(self, machine: str) -> tuple[int, int, int]:
        """Return the threads for each process of a machine, its cores, and the processes that may run there."""
        slots, most = sum(self._hosts.slots_of(machine).values()), self._settings.limits.max_np
        count = max(1, min(slots, most or slots))
        remote = self._hosts.remote(machine)
        cores = commands.cores() if remote is None or remote.ready is None else remote.ready.cores
        return max(1, cores // count), cores, count

    def _note_threads(self, threads: Mapping[str, tuple[int, int, int]]) -> None:
        what = ", ".join(f"{count} on {machine}" for machine, (count, _, _) in threads.items())
        if len(threads) == 1:
            count, cores, processes = next(iter(threads.values()))
            what = f"{count} ({cores} cores for {processes} ranks)"
        self._note(f"OMP_NUM_THREADS={what}; set it yourself to change that")


def _provisional(each: StartMember) -> World:
    """Return a joiner's first coordinates; its local rank, by which scripts choose a GPU, is its slot."""
    return World(each.rank, max(each.size, each.slot + 1), each.slot, each.slot + 1)
