"""Where rank 0 listens for ranks of other hosts: an address of its host that all of them reach, and ports that are kept."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from hvdlite.core.addresses import loopback, routes_to
from hvdlite.core.errors import LaunchError
from hvdlite.core.sockets import HeldPort
from hvdlite_runner.agents import host_probe
from hvdlite_runner.agents.remote_agent import RemoteAgent
from hvdlite_runner.job.hosts import HostPool
from hvdlite_runner.messages import ProbeReply, ProbeRequest, RouteReply, RouteRequest
from hvdlite_runner.placement import Host


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
