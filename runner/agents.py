"""The agents of all other hosts, as the launcher sees them: started, checked and asked in parallel, and ended."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from hvdlite.core.errors import LaunchError
from hvdlite.core.file_limit import reserve_descriptors
from hvdlite.core.held_port import HeldPort
from hvdlite_runner import host_probe
from hvdlite_runner.messages import AgentReady, Event, Order, ProbeReply, ProbeRequest, RouteReply, RouteRequest, Stop
from hvdlite_runner.placement import Host
from hvdlite_runner.remote_agent import Pinger, RemoteAgent
from hvdlite_runner.shells import Shell

Answer = TypeVar("Answer", bound=Event)
ANSWER_SECONDS: Final = 60.0
_DESCRIPTORS: Final = 3
"""Descriptors of a link: its two directions, and the file with its errors."""
_TURN: Final = 0.5


class Stopped(Exception):
    """Raised by a wait when the user has ended the job."""


class Agents:
    """The agents of a job's other hosts.

    Args:
        selector: its keys' `data` are functions to call when the descriptor is ready.
        take: called with (agent, event) for events that are not answers.
        lost: called with an agent whose link has ended after its host had been reached.
        stopped: returns whether the user has ended the job.
        unreached: called with an agent whose link has ended before.

    Attributes:
        remotes: the agents.
        held_ports: of rank 0, if it will be on this host: for its listener, and for the store of `torch.distributed`.
        store_port: the number of the latter, wherever rank 0 will be; 0 until it is known.
    """

    def __init__(self, selector: selectors.BaseSelector, take: Callable[[RemoteAgent, Event], None],
                 lost: Callable[[RemoteAgent], None], stopped: Callable[[], bool] = lambda: False,
                 unreached: Callable[[RemoteAgent], None] = lambda remote: None) -> None:
        self.remotes: list[RemoteAgent] = []
        self.held_ports: tuple[HeldPort, ...] = ()
        self.store_port = 0
        self._leaving: list[RemoteAgent] = []  # hosts that are not used any more, until their shells have ended
        self._pinger: Pinger | None = None
        self._selector, self._take, self._lost, self._stopped = selector, take, lost, stopped
        self._unreached = unreached
        self._answers: dict[RemoteAgent, Event] = {}
        self._waiting: type[Any] | None = None

    def reach(self, hosts: Sequence[Host], shell: Shell, bootstrap_input: bytes, timeout: float) -> None:
        """Start the agents of all hosts in parallel.

        Raises:
            LaunchError: with one line for each host whose agent cannot be started.
        """
        if not hosts:
            return
        try:
            with reserve_descriptors(_DESCRIPTORS * len(hosts), f"reaching {len(hosts)} hosts"):
                self.remotes = [RemoteAgent(host, shell, bootstrap_input, self._selector, self._tell,
                                            self._gone) for host in hosts]
        except OSError as error:
            raise LaunchError(f"cannot start {shell.program} to connect to other hosts: {error.strerror}") from None
        self._start_pinger()  # from now on: the first agent may wait long for the last one
        self._await(self.remotes, AgentReady, timeout)
        problems = []
        for remote in self.remotes:
            if remote.ready is None:
                if not remote.over:
                    remote.mark_lost(f"did not start its agent within {timeout:.0f} s (--start-timeout)")
                problems.append(remote.failure_reason())
        if problems:
            raise LaunchError("\n".join(problems))

    def add(self, host: Host, shell: Shell, bootstrap_input: bytes) -> RemoteAgent:
        """Start the agent of one more host, and do not wait for its `AgentReady`.

        Raises:
            LaunchError: when the remote shell cannot be started.
        """
        try:
            with reserve_descriptors(_DESCRIPTORS, f"reaching host {host.name}"):
                remote = RemoteAgent(host, shell, bootstrap_input, self._selector, self._tell, self._gone)
        except OSError as error:
            raise LaunchError(f"cannot start {shell.program} to connect to other hosts: {error.strerror}") from None
        self.remotes = [*self.remotes, remote]
        self._start_pinger()
        return remote

    def discard(self, remote: RemoteAgent) -> None:
        """Leave a host; its agent ends all processes there."""
        self.remotes = [each for each in self.remotes if each is not remote]
        self._start_pinger()
        if remote.over or remote.ready is None:
            remote.close()
        else:
            remote.send(Stop())
            self._leaving.append(remote)

    def ask(self, orders: Mapping[RemoteAgent, Order], kind: type[Answer],
            timeout: float = ANSWER_SECONDS) -> dict[RemoteAgent, Answer]:
        """Send orders and return the answers.

        Raises:
            LaunchError: with one line for each host without an answer.
        """
        for remote, order in orders.items():
            remote.send(order)
        answers: dict[RemoteAgent, Any] = self._await(list(orders), kind, timeout)
        missing = [remote.failure_reason() if remote.over
                   else f"host {remote.host.name} did not answer within {timeout:.0f} s"
                   for remote in orders if remote not in answers]
        if missing:
            raise LaunchError("\n".join(missing))
        return answers

    def turn(self, timeout: float | None) -> None:
        """Wait for an event of any host, and handle it."""
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) is key:  # not unregistered by an earlier one of this round
                key.data()
        for remote in [each for each in self._leaving if each.has_ended]:
            self._leaving.remove(remote)
            remote.close()

    def end(self, timeout: float) -> None:
        """Send `Stop` to all hosts and wait for their `AgentDone`; hosts without an answer count as lost."""
        if self._pinger is not None:
            self._pinger.stop()
        for remote in self.remotes:
            if remote.ready is None:
                remote.close()  # nothing was started there
            else:
                remote.send(Stop())
        until = time.monotonic() + timeout
        while (left := [remote for remote in [*self.remotes, *self._leaving] if not remote.over]) \
                and time.monotonic() < max(until, *(remote.last_heard + timeout for remote in left)):  # of large results
            self.turn(_TURN)
        for remote in [*self.remotes, *self._leaving]:
            remote.close()

    def _start_pinger(self) -> None:
        if self._pinger is None:
            self._pinger = Pinger()
        self._pinger.remotes = self.remotes

    def _await(self, remotes: Sequence[RemoteAgent], kind: type[Any], timeout: float) -> dict[RemoteAgent, Any]:
        self._answers, self._waiting = {}, kind
        until = time.monotonic() + timeout
        while time.monotonic() < until and not all(remote in self._answers or remote.over for remote in remotes):
            self.turn(min(_TURN, max(0.0, until - time.monotonic())))
            if self._stopped():
                raise Stopped
        self._waiting = None
        return self._answers

    def _tell(self, remote: RemoteAgent, event: Event) -> None:
        if self._waiting is not None and isinstance(event, self._waiting):
            self._answers[remote] = event
        else:
            self._take(remote, event)

    def _gone(self, remote: RemoteAgent) -> None:
        if remote in self._leaving:
            return
        if remote.ready is not None:
            self._lost(remote)
        else:
            self._unreached(remote)


@contextlib.contextmanager
def probed(agents: Agents, first: RemoteAgent | None, hosts: Sequence[str], interfaces: Sequence[str] = (),
           port: int = 0) -> Iterator[RouteReply]:
    """Return a context with a host's addresses for `hosts`, and a port of it that answers probes.

    Args:
        first: the host; None for the launcher's own.

    Raises:
        LaunchError: when the launcher's host cannot listen on the port.
    """
    if first is not None:
        yield agents.ask({first: RouteRequest(list(hosts), list(interfaces), port)}, RouteReply)[first]
        return
    try:
        server = host_probe.ProbeServer(port)
    except OSError as error:
        raise LaunchError(f"cannot listen on port {port} of this host: {error.strerror}") from None
    agents.held_ports = server.held, server.store
    with contextlib.closing(server):
        yield RouteReply(host_probe.own_addresses(hosts, interfaces), server.port, store_port=server.store.port)


def rendezvous_address(agents: Agents, first: RemoteAgent | None, others: Mapping[RemoteAgent | None, str],
                       interfaces: Sequence[str], port: int) -> str:
    """Return a host:port where rank 0 can listen and that every other host can reach.

    Args:
        first: the host of rank 0; None for the launcher's own host.
        others: the other hosts, with the route requests for rank 0's host.

    Raises:
        LaunchError: with the names of hosts that cannot reach each other.
    """
    targets = [name for name in others.values() if name]
    with probed(agents, first, targets, interfaces, port) as routed:
        here = "this host" if first is None else f"host {first.host.name}"
        if routed.problem:
            raise LaunchError(f"{here}: {routed.problem}")
        agents.store_port = routed.store_port
        if not routed.addresses:
            wanted = f" on {', '.join(interfaces)}" if interfaces else ""
            raise LaunchError(f"{here} has no address{wanted} that other hosts can reach; its addresses: "
                              f"{host_probe.interfaces() if first is None else 'see hvdrun --doctor'}")
        ask = ProbeRequest(routed.addresses, routed.port)
        found: dict[str, dict[str, str]] = {remote.host.name: answer.problems for remote, answer in agents.ask(
            {remote: ask for remote in others if remote is not None}, ProbeReply).items()}
        if None in others:
            found["this host"] = host_probe.probe(routed.addresses, routed.port)
    for address in routed.addresses:
        if not any(problems[address] for problems in found.values()):
            return f"[{address}]:{routed.port}" if ":" in address else f"{address}:{routed.port}"
    raise LaunchError("\n".join(unreachable(here, routed, found)))


def unreachable(here: str, routed: RouteReply, found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each host that cannot reach rank 0's host at the address that most hosts can reach."""
    best = min(routed.addresses, key=lambda address: sum(bool(problems[address]) for problems in found.values()))
    where = f"rank 0 on {here} at {best}, port {routed.port}"
    return [f"{name if name == 'this host' else f'host {name}'} cannot reach {where}: {problems[best]}; "
            "open a port there and name it with --coordinator-port, or choose a --network-interface"
            for name, problems in found.items() if problems[best]]
