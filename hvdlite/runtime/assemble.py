"""The composition root: the only place that chooses implementations."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.bootstrap.environments import LaunchInfo
from hvdlite.bootstrap.job_directory import JobDirectory, host_identity
from hvdlite.bootstrap.member_client import MemberClient
from hvdlite.bootstrap.rendezvous import Cancellation
from hvdlite.control.doorbell import Doorbell
from hvdlite.control.star import ControlPlane, LeaderControl
from hvdlite.control.wire import Connection
from hvdlite.core.config import Config, timeout_or_inf, tunable
from hvdlite.core.launch_contract import NO_STACK_DUMP, PROCESSES_FILE, StackDumpTarget
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.system_limits import reserve_descriptors
from hvdlite.core.world import Hosts, World
from hvdlite.diagnostics.process_probe import ProcessProbe
from hvdlite.engine.connections import Connections
from hvdlite.engine.oob import OobChannel
from hvdlite.memory.area import Area
from hvdlite.memory.futex import AVAILABLE as FUTEXES
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.layouts import BucketSizes
from hvdlite.negotiation.leader import Leader
from hvdlite.negotiation.messages import Layout
from hvdlite.negotiation.negotiator import Policy
from hvdlite.planes.arithmetic import Casts
from hvdlite.planes.base import DevicePlane, OobTexts, Plane
from hvdlite.planes.eager import reduce_payloads
from hvdlite.planes.gloo import gloo_plane
from hvdlite.planes.hierarchical import HierarchicalPlane
from hvdlite.planes.loopback import LoopbackHub, LoopbackPlane
from hvdlite.planes.mpi import mpi_plane
from hvdlite.planes.nccl.plane import VERDICT_SECONDS, create_nccl_plane
from hvdlite.planes.selection import PlaneChoice, choose_plane
from hvdlite.planes.shm import ShmPlane
from hvdlite.planes.shm_barrier import WakeRanks, one_by_one
from hvdlite.planes.staging import HostMemory
from hvdlite.runtime.meeting import Meeting, address_for_others, checked_world, common_clock
from hvdlite.runtime.runtime import Runtime

DevicePlaneMaker = Callable[[int, OobChannel, Callable[[], None]], DevicePlane]
"""Make the plane for GPUs of a rank, with what lets it meet the others, and what wakes its background thread."""

_log = logging.getLogger("hvdlite")


@dataclasses.dataclass(frozen=True)
class Learned:
    """What rank 0 announces in the first decision of a world (docs/protocol.md#carried-layouts).

    Attributes:
        layouts: by the labels of their gradient sets in the world that begins.
        tuned: knobs, and their values.
    """

    layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    tuned: Mapping[str, int] = dataclasses.field(default_factory=dict)


def coordinator_for(world: World, config: Config, learned: Learned | None = None, *,
                    mailbox_limit: int = 0) -> Coordinator | None:
    """Return the coordinator on rank 0, None elsewhere.

    Args:
        learned: in the last world of an elastic job.
        mailbox_limit: see `Policy`.
    """
    if world.rank != 0:
        return None
    policy = Policy(config.fusion_threshold, bucket_sizes(config, world.size, mailbox_limit), config.bucket_layouts,
                    config.join_divides_by_active, mailbox_limit, config.autotune, config.deterministic)
    coordinator = Coordinator(world.size, policy, reduce_payloads, epoch=world.epoch)
    if learned is not None:
        if learned.tuned:
            coordinator.tune(learned.tuned, 0.0)
        coordinator.carry_over(learned.layouts)
    return coordinator


def bucket_sizes(config: Config, ranks: int, mailbox_limit: int) -> BucketSizes:
    """Return how gradient sets are cut into buckets.

    Where the ranks leave no core of their host free, what is reduced during a backward pass takes its time from it. So a set
    is one bucket there, which the threads reduce that wait for it, unless the user has said otherwise.
    """
    is_free = {"bucket_edge", "bucket_size"} <= tunable(config).keys() and not config.autotune
    return BucketSizes(config.bucket_edge, config.bucket_size,
                       has_one_on_host=is_free and mailbox_limit > 0 and ranks >= (os.cpu_count() or 1))


def _alone(epoch: int, config: Config, casts: Casts, devices: DevicePlaneMaker) -> Runtime:
    """Return the runtime of a job of one rank, not yet started."""
    control, oob = ControlPlane(0, {}, {0: Doorbell()}, {}, heartbeat_timeout=config.heartbeat_timeout), OobChannel(0)
    plane, world = LoopbackPlane(0, LoopbackHub(), control.wake_rank, casts), World(epoch=epoch)
    return Runtime(world, config, Connections(control, plane, oob, devices(0, oob, control.wake)),
                   coordinator_for(world, config))


def gpus(info: LaunchInfo, config: Config, environment: Mapping[str, str]) -> DevicePlaneMaker:
    """Return what makes the plane for this process's GPU, which is neither loaded nor looked for before it is used."""
    is_one_host = info.world.local_size == info.world.size
    verdict_seconds = VERDICT_SECONDS if is_one_host else max(VERDICT_SECONDS, config.heartbeat_timeout)
    return lambda rank, oob, wake: create_nccl_plane(rank, info.world.local_rank, host_identity(), oob, wake, environment,
                                                     shared_gpu=config.shared_gpu, verdict_seconds=verdict_seconds)


def assemble(info: LaunchInfo, config: Config, casts: Casts, stack_dump: StackDumpTarget = NO_STACK_DUMP,
             environment: Mapping[str, str] | None = None, member: MemberClient | None = None,
             cancellation: Cancellation | None = None, learned: Learned | None = None) -> Runtime:
    """Meet the other ranks of this job and return this rank's runtime, not yet started.

    Args:
        stack_dump: where this process writes its stacks; see `diagnostics.process_probe`.
        environment: the process's, in which NCCL looks for its settings.
        member: in an elastic job, the link with its launcher.
        cancellation: may end the meeting from another thread.
        learned: in the last world of an elastic job.

    Raises:
        LaunchError: when the ranks cannot meet.
    """
    if info.world.size == 1:
        return _alone(info.world.epoch, config, casts, gpus(info, config, environment or {}))
    directory = JobDirectory(info.job_directory, agreed=info.owns_directory)
    meeting = Meeting(info, config, cancellation or Cancellation(), directory, member)
    with contextlib.ExitStack() as made:
        runtime = _assembled(meeting, casts, stack_dump, environment or {}, made, learned)
        made.pop_all()  # the runtime closes them
    return runtime


def _assembled(meeting: Meeting, casts: Casts, stack_dump: StackDumpTarget, environment: Mapping[str, str],
               made: contextlib.ExitStack, learned: Learned | None) -> Runtime:
    """Like `assemble`, in a job of several ranks.

    Args:
        made: gets what must be closed when this fails half-way. All of it can be closed twice.
    """
    info, config = meeting.info, meeting.config
    with contextlib.closing(meeting.directory):
        direct, welcome = meeting.ranks(stack_dump)
        for connection in direct.values():
            made.callback(connection.close)
        hosts = Hosts.of(welcome.hosts)
        world = checked_world(info, hosts)
        local = hosts.local_ranks(world.rank)
        address = config.gloo_interface or address_for_others(direct, welcome)
        pids = {rank: welcome.pids[rank] for rank in local}
        # For each rank of the host: a doorbell, a process to watch and, where this rank leads, a connection's two ends.
        leads = welcome.use_leaders and world.rank == local[0]
        with reserve_descriptors((4 if leads else 2) * len(local), f"rank {world.rank}, one of {len(local)} on its host,"):
            doorbells, memory, inside = meeting.shared(local, made, use_leaders=welcome.use_leaders)
            control = _control(world, hosts, direct, inside, doorbells, pids, config, use_leaders=welcome.use_leaders)
            made.callback(control.close)
    oob = OobChannel(world.rank)
    planes = HostPlanes(world.rank, hosts, config, casts, memory, one_by_one(control.wake_rank), control.wake, oob, address,
                        info.communicator, dict(welcome.unavailable))
    choice = choose_plane(config.cpu_operations, hosts, planes.unavailable)
    if world.rank == 0:
        _log.info("%s", choice)
    plane = planes.make(choice)
    made.callback(plane.close)
    plane.add_process_set(GLOBAL_PROCESS_SET_ID, tuple(range(world.size)))
    probe = ProcessProbe(pids, {rank: welcome.stack_dumps[rank] for rank in local})
    has_mailboxes = choice.name == "shm" and FUTEXES
    devices = gpus(info, config, environment)(world.rank, oob, control.wake)
    connections = Connections(control, plane, oob, devices, probe, common_clock(welcome),
                              memory.mapped_range if has_mailboxes else None, casts,
                              dict(zip(local, memory.heaps(len(local)), strict=True)), planes.of_group, info.rank_names)
    coordinator = coordinator_for(world, config, learned, mailbox_limit=config.mailbox_limit if has_mailboxes else 0)
    runtime = Runtime(world, config, connections, coordinator, hosts)
    if not info.owns_directory:
        if world.rank == local[0]:
            try:
                probe.write(str(Path(info.job_directory) / PROCESSES_FILE))
            except OSError as error:  # a full disk does not end an elastic job that trains
                if world.epoch <= 1:
                    raise
                _log.warning("hvdrun cannot show the stacks of world %d: %s", world.epoch, error)
        if world.rank == 0:
            runtime.serve_reports(info.job_directory)
    return runtime


@dataclasses.dataclass(frozen=True)
class HostPlanes:
    """Makes the planes for host memory of one rank.

    Attributes:
        memory: the host's shared file.
        wake_ranks: wakes ranks of this host that wait in a plane.
        wake: lets this rank look whether what it waits for in a plane has come.
        oob: lets planes of different ranks connect.
        address: at which other hosts reach this one: an IP address or a network interface.
        communicator: MPI's, of all ranks; None without MPI.
        unavailable: see `choose_plane`.
    """

    rank: int
    hosts: Hosts
    config: Config
    casts: Casts
    memory: HostMemory
    wake_ranks: WakeRanks
    wake: Callable[[], None]
    oob: OobTexts
    address: str
    communicator: Any
    unavailable: Mapping[str, str]

    def make(self, choice: PlaneChoice) -> Plane:
        """Return the chosen plane."""
        config = self.config
        if choice.name == "shm":
            return ShmPlane(self.rank, self.memory, self.wake_ranks, slot=config.shm_slot, chunk=config.shm_chunk,
                            direct=config.shm_direct, casts=self.casts)
        if choice.name == "hierarchical":
            backend = self._backend(choice.cross_backend)
            return HierarchicalPlane(self.rank, self.hosts, self.memory, self.wake_ranks, backend,
                                     slot=config.shm_slot, chunk=config.shm_chunk, direct=config.shm_direct,
                                     casts=self.casts)
        return self._backend(choice.name)

    def of_group(self, rank: int, hosts: Hosts, memory: HostMemory, area: Area, oob: OobTexts) -> Plane:
        """Return the plane of a group; see `engine.connections.GroupPlanes`. MPI is not used for groups."""
        local = {each: index for index, each in enumerate(hosts.local_ranks(rank))}

        def wake_ranks(ranks: Sequence[int]) -> None:
            area.wake([local[each] for each in ranks])

        own = dataclasses.replace(self, rank=rank, hosts=hosts, memory=memory, wake_ranks=wake_ranks,
                                  wake=lambda: area.wake((area.index,)), oob=oob)
        plane = own.make(self.choice_for_groups(hosts))
        plane.add_process_set(GLOBAL_PROCESS_SET_ID, tuple(range(sum(map(len, hosts.ranks_by_host)))))
        return plane

    def choice_for_groups(self, hosts: Hosts) -> PlaneChoice:
        """Return which plane a group has whose ranks are on these hosts."""
        wanted = "auto" if self.config.cpu_operations == "mpi" else self.config.cpu_operations
        return choose_plane(wanted, hosts, {**self.unavailable, "mpi": "groups do not use it"})

    def _backend(self, name: str) -> Plane:
        config = self.config
        if name == "mpi":
            return mpi_plane(self.communicator, chunk=config.shm_chunk, casts=self.casts)
        return gloo_plane(self.rank, self.oob, self.wake, self.address, timeout=timeout_or_inf(config.gloo_timeout),
                          chunk=config.shm_chunk, casts=self.casts)


def _control(world: World, hosts: Hosts, direct: Mapping[int, Connection], inside: Mapping[int, Connection],
             doorbells: Mapping[int, Doorbell], pids: Mapping[int, int], config: Config, *,
             use_leaders: bool) -> ControlPlane:
    """Return this rank's end of the star.

    Args:
        direct: connections between rank 0 and each other rank; those that are not needed are closed.
        inside: those between a host's leader and each other rank of it.
    """
    rank = world.rank
    others = {other: pid for other, pid in pids.items() if other != rank}
    if not use_leaders:
        return ControlPlane(rank, direct, doorbells, others, heartbeat_timeout=timeout_or_inf(config.heartbeat_timeout))
    groups = {group[0]: group for group in hosts.ranks_by_host}
    kept = {peer: group for peer, group in direct.items() if rank in groups and (rank or peer in groups)}
    for peer in direct.keys() - kept.keys():
        direct[peer].close()
    links = {**kept, **inside}
    local = hosts.local_ranks(rank)
    leads = rank in groups
    if rank and leads and others:
        return LeaderControl(Leader(local, world.size, epoch=world.epoch, in_order=config.deterministic), links,
                             doorbells, others, heartbeat_timeout=timeout_or_inf(config.heartbeat_timeout))
    spoken_for = {} if rank else {leader: group for leader, group in groups.items() if leader and len(group) > 1}
    return ControlPlane(rank, links, doorbells, others, heartbeat_timeout=timeout_or_inf(config.heartbeat_timeout),
                       parent=0 if leads else local[0], hosts=spoken_for)
