"""How the ranks of a world meet: where rank 0 listens, what they exchange, and what the ranks of a host share."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from hvdlite._version import __version__
from hvdlite.bootstrap.admission import accept_ranks
from hvdlite.bootstrap.descriptors import recv_fds, send_fds
from hvdlite.bootstrap.environments import LaunchInfo
from hvdlite.bootstrap.job_directory import JobDirectory, host_identity
from hvdlite.bootstrap.member_client import MemberClient
from hvdlite.bootstrap.rendezvous import Address, Cancellation, advertised_address, connect_to_rank_0, listen
from hvdlite.control.doorbell import Doorbell
from hvdlite.control.wire import Connection, RankInfo, Welcome
from hvdlite.core.config import Config, matching_knobs, timeout_or_inf
from hvdlite.core.errors import LaunchError
from hvdlite.core.kernel_files import anonymous_file
from hvdlite.core.launch_contract import StackDumpTarget
from hvdlite.core.sockets import loopback
from hvdlite.core.texts import encodable
from hvdlite.core.world import Hosts, World
from hvdlite.memory import fence
from hvdlite.memory.shared import SharedMemory
from hvdlite.planes.gloo import unavailable_reason as gloo_unavailable_reason

_log = logging.getLogger("hvdlite")

LATE_SECONDS: Final = 5.0
"""After so long a rank that no launcher of hvdlite's has started reports for which ranks it waits."""
SAME_CLOCK_SECONDS: Final = 0.05
"""Two clocks that differ by less when the ranks meet are one: what is seen is how long the welcome took."""


@dataclasses.dataclass(frozen=True)
class Meeting:
    """One rank's way to the others of its world.

    Attributes:
        cancellation: ends the meeting from another thread.
        directory: where the ranks of this host find each other.
        member: in an elastic job, the link by which rank 0's address is sent; None in other jobs.
    """

    info: LaunchInfo
    config: Config
    cancellation: Cancellation
    directory: JobDirectory
    member: MemberClient | None = None

    def ranks(self, stack_dump: StackDumpTarget) -> tuple[Mapping[int, Connection], Welcome]:
        """Meet the other ranks: return rank 0's connections to them, or theirs to rank 0, and who they are.

        Raises:
            LaunchError: when the ranks cannot meet.
        """
        if not self.info.variables:
            return self._ranks(stack_dump)
        late = threading.Timer(LATE_SECONDS, self._report_late)
        late.daemon = True
        late.start()
        try:
            return self._ranks(stack_dump)
        finally:
            late.cancel()

    def _report_late(self) -> None:
        world, variables = self.info.world, " and ".join(self.info.variables)
        missing = f"rank {1 - world.rank}" if world.size == 2 else "the other ranks" if world.rank == 0 else "rank 0"
        _log.warning("rank %d has waited %g s for %s: the environment says %s. If this process is to run alone, unset them",
                     world.rank, LATE_SECONDS, missing, variables)

    def _ranks(self, stack_dump: StackDumpTarget) -> tuple[Mapping[int, Connection], Welcome]:
        own, config = self._own_info(stack_dump), self.config
        timeout = timeout_or_inf(config.start_timeout)
        if own.rank != 0:
            connection, welcome = connect_to_rank_0(self._address(), own, timeout=timeout, frame_limit=config.frame_limit,
                                                    cancellation=self.cancellation)
            return {0: connection}, msgspec.structs.replace(welcome, clock=welcome.clock - time.monotonic())
        address = self._address()
        if address.path:
            self.directory.make()
        with contextlib.closing(listen(address)) as listener:
            try:
                if self._has_own_address:
                    assert self.member is not None
                    self.member.announce_coordinator(own.epoch, listener.getsockname()[1])
                connections, welcome = accept_ranks(
                    listener, address, own, timeout=timeout, frame_limit=config.frame_limit,
                    use_leaders=config.control != "tcp", cancellation=self.cancellation)
                return connections, msgspec.structs.replace(welcome, clock=0.0)
            finally:
                if address.path:
                    Path(address.resolved()[1]).unlink(missing_ok=True)

    def shared(self, local: Sequence[int], made: contextlib.ExitStack, *,
               use_leaders: bool) -> tuple[dict[int, Doorbell], SharedMemory, dict[int, Connection]]:
        """Make (the host's first rank) or receive (the others) the host's shared memory, one doorbell a rank and, when the
        hosts have leaders, a connection between the first rank and each other one.

        Args:
            made: gets what must be closed when this fails, or what follows.
        """
        rank, (leader, *others) = self.info.world.rank, local
        timeout = timeout_or_inf(self.config.start_timeout)
        name = self._socket_name("memory")
        fenced = fence.is_needed()
        pairs = [socket.socketpair() for _ in others] if use_leaders and rank == leader else []
        if rank == leader:
            doorbells = [Doorbell() for _ in local]
            file = anonymous_file()
            fences = [fence.fence_file()] if fenced else []
            memory = SharedMemory(file, rank, fence.Fence(fences[0]) if fences else None)
            for close in (memory.close, *(doorbell.close for doorbell in doorbells), *(ours.close for ours, _ in pairs)):
                made.callback(close)
            with contextlib.ExitStack() as given:
                for _, theirs in pairs:
                    given.callback(theirs.close)
                if others:
                    rings = [descriptor for doorbell in doorbells for descriptor in doorbell.descriptors]
                    ends = [[theirs.fileno()] for _, theirs in pairs] if use_leaders else [[] for _ in others]
                    self.directory.make()
                    send_fds(self.directory.socket_path(name), [file, *fences, *rings], ends, timeout, self.cancellation)
            inside = {other: Connection(ours, frame_limit=self.config.frame_limit)
                      for other, (ours, _) in zip(others, pairs, strict=use_leaders)}
            return dict(zip(local, doorbells, strict=True)), memory, inside
        file, *rest = recv_fds(lambda: self.directory.socket_path(name), others.index(rank), timeout, self.cancellation)
        memory = SharedMemory(file, rank, fence.Fence(rest.pop(0)) if fenced else None)
        inside = {}
        if use_leaders:
            inside = {leader: Connection(socket.socket(fileno=rest.pop()), frame_limit=self.config.frame_limit)}
        each = len(rest) // len(local)
        received = [Doorbell(rest[start:start + each]) for start in range(0, len(rest), each)]
        for close in (memory.close, *(doorbell.close for doorbell in received),
                      *(connection.close for connection in inside.values())):
            made.callback(close)
        return dict(zip(local, received, strict=True)), memory, inside

    def _own_info(self, stack_dump: StackDumpTarget) -> RankInfo:
        info, world = self.info, self.info.world
        no_mpi = "" if info.communicator is not None else info.mpi_problem or "the job was not started with mpirun"
        reasons = {"mpi": no_mpi, "gloo": gloo_unavailable_reason()}
        lacks = tuple((name, reason) for name, reason in reasons.items() if reason)
        return RankInfo(rank=world.rank, size=world.size, pid=os.getpid(),
                        host=encodable(f"{host_identity()}:{info.job_directory}"),
                        version=__version__, job=info.job, stack_dump=stack_dump, settings=matching_knobs(self.config),
                        unavailable=lacks, epoch=world.epoch)

    @property
    def _over_tcp(self) -> bool:
        return self.config.control == "tcp" or self.info.on_several_hosts

    @property
    def _has_own_address(self) -> bool:
        """Whether rank 0 chooses where it listens, and its address is sent to the others."""
        return self._over_tcp and self.info.world.epoch > 1

    def _address(self) -> Address:
        """Return where rank 0 listens.

        Raises:
            LaunchError: when that cannot be known.
        """
        info, world = self.info, self.info.world
        if not self._over_tcp:
            name = self._socket_name("control")
            return Address(path=f"{info.job_directory}{'.*' * info.owns_directory}/{name}",
                           locate=lambda: self.directory.socket_path(name))
        if self.config.control == "unix":
            raise LaunchError("HVDLITE_CONTROL=unix is for one host, and the job has ranks on several")
        if self._has_own_address:
            assert self.member is not None
            host, port = ("", info.coordinator_port) if world.rank == 0 else self.member.coordinator(
                world.epoch, timeout_or_inf(self.config.start_timeout))
            return Address(host=host, port=port, key=info.key, how_to_have_a_key=info.how_to_have_a_key)
        if info.coordinator is None:
            raise LaunchError("ranks that meet over TCP need HVDLITE_COORDINATOR=host:port, the same on all ranks")
        host, port = info.coordinator
        return Address(host=host, port=port, key=info.key, how_to_have_a_key=info.how_to_have_a_key)

    def _socket_name(self, name: str) -> str:
        """Return the name of a socket in the job directory; in an elastic job each world has sockets of its own."""
        epoch = self.info.world.epoch
        return f"{name}.{epoch}.sock" if epoch else f"{name}.sock"


def checked_world(info: LaunchInfo, hosts: Hosts) -> World:
    """Return this rank's coordinates as the ranks have found them to be.

    Raises:
        LaunchError: when the launcher has given other values.
    """
    given, found = info.world, hosts.world(info.world.rank, info.world.epoch)
    if given.local_size != found.local_size:
        raise LaunchError(f"rank {given.rank} was started as if {given.local_size} ranks share its host, but it shares "
                          f"machine, process table and job directory with ranks {list(hosts.local_ranks(given.rank))} only. "
                          "Ranks in different containers are on different hosts; check HVDLITE_LOCAL_SIZE "
                          f"({info.environment})")
    return found


def address_for_others(connections: Mapping[int, Connection], welcome: Welcome) -> str:
    """Return the IP address of this host on the way to rank 0; on rank 0 and beside it, the one by which others come."""
    own = advertised_address(connections.values())
    return own or welcome.advertised_address or loopback() or "127.0.0.1"


def common_clock(welcome: Welcome) -> Callable[[], float]:
    """Return rank 0's clock, as estimated when the ranks met; that of this host, where it is the same."""
    offset = welcome.clock
    if abs(offset) < SAME_CLOCK_SECONDS:
        return time.monotonic
    return lambda: time.monotonic() + offset
