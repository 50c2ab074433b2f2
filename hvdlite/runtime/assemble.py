"""The composition root: the only place that chooses implementations."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdlite._version import __version__
from hvdlite.bootstrap.descriptors import give, take
from hvdlite.bootstrap.environments import Place, check_directory
from hvdlite.control.codec import Hello, Welcome
from hvdlite.control.doorbell import Doorbell
from hvdlite.control.inproc import InprocControl
from hvdlite.control.meeting import Address, host_identity, join, listen, receive_ranks
from hvdlite.control.star import StarControl
from hvdlite.control.wire import Connection
from hvdlite.control.witness import Witness
from hvdlite.core.config import Config
from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import PROCESSES_FILE
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.world import World
from hvdlite.memory.shared import SharedMemory, anonymous_file
from hvdlite.negotiation.buckets import BucketSizes
from hvdlite.negotiation.coordinator import Coordinator, Policy
from hvdlite.planes.arithmetic import Casts
from hvdlite.planes.base import Plane
from hvdlite.planes.eager import reduce_payloads
from hvdlite.planes.loopback import LoopbackPlane, Table
from hvdlite.planes.shm import ShmPlane
from hvdlite.runtime.runtime import Runtime

PlaneWrapper = Callable[[int, Plane], Plane]


def coordinator_for(world: World, config: Config) -> Coordinator | None:
    """Return the coordinator on rank 0, None elsewhere."""
    if world.rank != 0:
        return None
    policy = Policy(config.fusion_threshold, BucketSizes(config.bucket_edge, config.bucket_size), config.bucket_layouts,
                    config.join_divides_by_active, config.deterministic)
    return Coordinator(world.size, policy, reduce_payloads)


def assemble_threads(size: int, config: Config, wrap: PlaneWrapper = lambda rank, plane: plane,
                     casts: Casts | None = None) -> list[Runtime]:
    """Return the runtimes of `size` ranks that live in this process, not yet started; `wrap` may inject faults."""
    table = Table()
    casts = casts or Casts.of_numpy()
    runtimes = []
    for rank, control in enumerate(InprocControl.star(size)):
        world = World(rank, size, rank, size)
        plane = wrap(rank, LoopbackPlane(rank, table, control.ring, casts))
        runtimes.append(Runtime(world, config, control, plane, coordinator_for(world, config)))
    return runtimes


def assemble(place: Place, config: Config, casts: Casts, testimony: tuple[int, int] = (-1, 0)) -> Runtime:
    """Meet the other ranks of this job and return this rank's runtime, not yet started.

    Args:
        testimony: where this process writes its stacks; see `control.witness`.

    Raises:
        LaunchError: when the ranks cannot meet.
    """
    if place.world.size == 1:
        return assemble_threads(1, config, casts=casts)[0]
    check_directory(place.job_directory)
    try:
        connections, welcome = _meet(place, config, testimony)
        if len(set(welcome.hosts)) > 1:
            raise LaunchError(f"the ranks are on several hosts or in several process namespaces "
                              f"({sorted(set(welcome.hosts))}): "
                              "this version has no data plane between them yet; start all ranks on one host")
        bells, memory = _shared(place, config)
    finally:
        if place.owns_directory and place.world.rank == 0:
            shutil.rmtree(place.job_directory, ignore_errors=True)
    pids = {rank: pid for rank, pid in enumerate(welcome.pids) if rank != place.world.rank}
    control = StarControl(place.world.rank, connections, bells, pids, heartbeat_timeout=config.heartbeat_timeout)
    plane = ShmPlane(place.world.rank, memory, control.ring, slot=config.shm_slot, chunk=config.shm_chunk,
                     direct=config.shm_direct, casts=casts)
    plane.open_set(GLOBAL_PROCESS_SET_ID, tuple(range(place.world.size)))
    witness = Witness(dict(enumerate(welcome.pids)), dict(enumerate(welcome.testimonies)))
    runtime = Runtime(place.world, config, control, plane, coordinator_for(place.world, config), witness)
    if place.world.rank == 0 and not place.owns_directory:
        witness.write(str(Path(place.job_directory) / PROCESSES_FILE))
        runtime.open_desk(place.job_directory)
    return runtime


def _meet(place: Place, config: Config, testimony: tuple[int, int]) -> tuple[Mapping[int, Connection], Welcome]:
    world = place.world
    own = Hello(world.rank, world.size, os.getpid(), host_identity(), __version__, testimony)
    address = _address(place, config)
    if world.rank != 0:
        connection, welcome = join(address, own, timeout=config.start_timeout, frame_limit=config.frame_limit)
        return {0: connection}, welcome
    with contextlib.closing(listen(address)) as listener:
        try:
            return receive_ranks(listener, address, own, timeout=config.start_timeout, frame_limit=config.frame_limit)
        finally:
            if address.path:
                Path(address.path).unlink(missing_ok=True)


def _address(place: Place, config: Config) -> Address:
    if config.control == "tcp":
        if place.coordinator is None:
            raise LaunchError("HVDLITE_CONTROL=tcp needs HVDLITE_COORDINATOR=host:port, the same on all ranks")
        return Address(host=place.coordinator[0], port=place.coordinator[1], key=place.key)
    return Address(path=str(Path(place.job_directory) / "control.sock"))


def _shared(place: Place, config: Config) -> tuple[dict[int, Doorbell], SharedMemory]:
    """Make (rank 0) or receive (the others) the host's shared memory and one bell a rank."""
    world = place.world
    path = str(Path(place.job_directory) / "memory.sock")
    if world.rank == 0:
        bells = [Doorbell() for _ in range(world.size)]
        file = anonymous_file()
        memory = SharedMemory(file, 0)
        give(path, [file, *(descriptor for bell in bells for descriptor in bell.descriptors)], world.size - 1,
             config.start_timeout)
        return dict(enumerate(bells)), memory
    file, *rest = take(path, config.start_timeout)
    each = len(rest) // world.size
    received = [Doorbell(rest[start:start + each]) for start in range(0, len(rest), each)]
    return dict(enumerate(received)), SharedMemory(file, world.rank)


