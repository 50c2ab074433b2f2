"""How a job's processes are started: where, with which variables, and with how many cores; and where rank 0 listens.

Rank 0 listens for ranks of other hosts at an address of its host that all of them reach, and at ports that are kept for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hvdlite.core import launch_contract
from hvdlite.core.errors import LaunchError
from hvdlite.core.sockets import HeldPort, loopback, routes_to
from hvdlite.core.world import Hosts, World
from hvdlite.membership.events import StartMember
from hvdlite.membership.messages import Listening
from hvdlite_runner.agents import host_probe
from hvdlite_runner.agents.remote_agent import RemoteAgent
from hvdlite_runner.host import commands
from hvdlite_runner.job.ending import TERMINATE_GRACE
from hvdlite_runner.job.hosts import HostPool
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.messages import ProbeReply, ProbeRequest, ProcessStart, RouteReply, RouteRequest, Start
from hvdlite_runner.placement import LOCAL, Host


class Starts:
    """Makes the orders that start processes.

    Args:
        inherited: the launcher's environment.
        key: the job's key.
        note: called with lines for the user.
    """

    def __init__(self, settings: JobSettings, hosts: HostPool, inherited: Mapping[str, str], key: str,
                 note: Callable[[str], None]) -> None:
        self._settings = settings
        self._hosts = hosts
        self._inherited = inherited
        self._key = key
        self._note = note
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

    def listening(self, machine: str, message: Listening, others: Iterable[str]) -> Listening | None:
        """Return where rank 0 of a world listens, which other machines must reach; None while its agent is asked.

        Its host's agent knows how they are reached from there; it answers with a `RouteReply`.
        """
        remote = self._hosts.remote(machine)
        here = "" if remote is None else address_for(remote)
        hosts = [here if other == LOCAL else Host(other).address for other in others if other != machine]
        if remote is None:
            return listening_at(message, host_probe.own_addresses(hosts, self._settings.interfaces))
        remote.send(RouteRequest(hosts, list(self._settings.interfaces), listen=False))
        return None

    def _order(self, machine: str, processes: list[ProcessStart], shared: Mapping[str, str]) -> Start:
        threads = {"OMP_NUM_THREADS": str(self._threads(machine)[0])} if self._settings.share_cores else {}
        return Start(processes, commands.to_bytes(self._settings.command), commands.values_to_bytes({**threads, **shared}),
                     self._is_elastic, self._settings.has_input and machine == LOCAL,
                     TERMINATE_GRACE if self._settings.grace is None else self._settings.grace,
                     self._settings.preemption_script if self._is_elastic else "")

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
        count = max(self._settings.share_cores, min(slots, most or slots))
        remote = self._hosts.remote(machine)
        cores = commands.cores() if remote is None or remote.ready is None else remote.ready.cores
        return max(1, cores // count), cores, count

    def _note_threads(self, threads: Mapping[str, tuple[int, int, int]]) -> None:
        what = ", ".join(f"{count} on {machine}" for machine, (count, _, _) in threads.items())
        if len(threads) == 1:
            count, cores, processes = next(iter(threads.values()))
            what = f"{count} (cores: {cores}, ranks: {processes})"
        self._note(f"OMP_NUM_THREADS={what}; set it yourself to change that")


def _provisional(each: StartMember) -> World:
    """Return a joiner's first coordinates; its local rank, by which scripts choose a GPU, is its slot."""
    return World(each.rank, max(each.size, each.slot + 1), each.slot, each.slot + 1)


@dataclasses.dataclass(frozen=True)
class Route:
    """Where rank 0 is reached.

    Attributes:
        coordinator: host:port for its listener; "" if all ranks are on its host and need none.
        master: the address and port for the store of `torch.distributed`.
        held: keep the ports until rank 0 has them, if it is on the launcher's host.
    """

    coordinator: str
    master: tuple[str, int]
    held: tuple[HeldPort, ...] = ()


def local_route(*, over_tcp: bool) -> Route:
    """Return the route between ranks of the launcher's own host.

    Args:
        over_tcp: whether they connect by TCP instead of Unix sockets.

    Raises:
        LaunchError: when they are to connect by TCP, and the host has no loopback address.
    """
    address, store = loopback(), HeldPort()
    master = (address or "127.0.0.1", store.port)
    if not over_tcp:
        return Route("", master, (store,))
    if not address:
        raise LaunchError("the ranks are to connect by TCP (HVDLITE_CONTROL=tcp), and this host has neither "
                          "127.0.0.1 nor ::1: run `ip link set lo up`, or let them use Unix sockets")
    held = HeldPort(host=address)
    return Route(_joined(address, held.port), master, (store, held))


def route_between(pool: HostPool, machines: Sequence[str], interfaces: Sequence[str], port: int) -> Route:
    """Return a route to the first of several machines, on which rank 0 will be, that all others can use.

    Args:
        interfaces: the names of those that may be used; empty for all.
        port: of rank 0's listener; 0 for any.

    Raises:
        LaunchError: with the names of hosts that cannot reach each other.
    """
    first, others = pool.remote(machines[0]), {pool.remote(name): Host(name).address for name in machines[1:]}
    if None in others and first is not None:
        others[None] = address_for(first)
    with probed(pool, first, list(filter(None, others.values())), interfaces, port) as (routed, held):
        here = "this host" if first is None else f"host {first.host.name}"
        if routed.problem:
            raise LaunchError(f"{here}: {routed.problem}")
        if not routed.addresses:
            wanted = f" on {', '.join(interfaces)}" if interfaces else ""
            raise LaunchError(f"{here} has no address{wanted} that other hosts can reach; its addresses: "
                              f"{host_probe.interfaces() if first is None else 'see hvdrun --doctor'}")
        ask = ProbeRequest(routed.addresses, routed.port)
        found: dict[str, dict[str, str]] = {remote.host.name: answer.problems for remote, answer in pool.ask(
            {remote: ask for remote in others if remote is not None}, ProbeReply).items()}
        if None in others:
            found["this host"] = host_probe.probe(routed.addresses, routed.port)
    for address in routed.addresses:
        if not any(problems[address] for problems in found.values()):
            return Route(_joined(address, routed.port), (address, routed.store_port), held)
    raise LaunchError("\n".join(_unreachable(here, routed, found)))


def route_on(pool: HostPool, machine: str, *, over_tcp: bool) -> Route:
    """Return the route between ranks that are all on another machine.

    Args:
        over_tcp: whether they connect by TCP instead of Unix sockets.

    Raises:
        LaunchError: when it does not answer, or cannot listen.
    """
    address = loopback() or "127.0.0.1"
    with probed(pool, pool.remote(machine), []) as (routed, held):
        if routed.problem:
            raise LaunchError(f"host {machine}: {routed.problem}")
        return Route(_joined(address, routed.port) if over_tcp else "", (address, routed.store_port), held)


@contextlib.contextmanager
def probed(pool: HostPool, first: RemoteAgent | None, hosts: Sequence[str], interfaces: Sequence[str] = (),
           port: int = 0) -> Iterator[tuple[RouteReply, tuple[HeldPort, ...]]]:
    """Return a context with a host's addresses for `hosts` and a port of it that answers probes, and the ports held here.

    Args:
        first: the host; None for the launcher's own.

    Raises:
        LaunchError: when the launcher's host cannot listen on the port.
    """
    if first is not None:
        yield pool.ask({first: RouteRequest(list(hosts), list(interfaces), port)}, RouteReply)[first], ()
        return
    try:
        server = host_probe.ProbeServer(port)
    except OSError as error:
        raise LaunchError(f"cannot listen on port {port} of this host: {error.strerror}") from None
    with contextlib.closing(server):
        yield (RouteReply(host_probe.own_addresses(hosts, interfaces), server.port, store_port=server.store.port),
               (server.held, server.store))


def address_for(remote: RemoteAgent) -> str:
    """Return the address of this host towards another one; "" when only the remote shell knows its name."""
    return next(iter(routes_to([remote.host.address])), "")


def _unreachable(here: str, routed: RouteReply, found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each host that cannot reach rank 0's host at the address that most hosts can reach."""
    best = min(routed.addresses, key=lambda address: sum(bool(problems[address]) for problems in found.values()))
    where = f"rank 0 on {here} at {best}, port {routed.port}"
    return [f"{name if name == 'this host' else f'host {name}'} cannot reach {where}: {problems[best]}; "
            "open a port there and name it with --coordinator-port, or choose a --network-interface"
            for name, problems in found.items() if problems[best]]


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def listening_at(message: Listening, addresses: Sequence[str]) -> Listening:
    """Return a message of rank 0's with the addresses of its host, if there are any."""
    return Listening(message.epoch, tuple(addresses) or message.addresses, message.port)
