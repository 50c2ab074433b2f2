"""The rank, size and job of this process: from its environment, over MPI, or from the `comm` that is passed to `init`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.bootstrap.environments import MAKE_A_KEY, LaunchInfo, job_key, read_launch_info
from hvdlite.bootstrap.job_directory import agreed_prefix
from hvdlite.bootstrap.mpi import launch_info_over_mpi
from hvdlite.core.config import Config
from hvdlite.core.errors import LaunchError, UnsupportedError
from hvdlite.core.launch_contract import SECRET
from hvdlite.core.world import World
from hvdlite.planes import mpi


def resolve_launch(comm: object, environ: Mapping[str, str], parent: int, config: Config) -> LaunchInfo:
    """Return this process's launch information.

    Args:
        comm: as for `api.init`.
        parent: as for `read_launch_info`.

    Raises:
        LaunchError: when rank or size cannot be determined.
        UnsupportedError: for an invalid `comm`, or one without this rank.
    """
    if hasattr(comm, "Get_group"):
        return _by_communicator(comm, job_key(environ))
    info = read_launch_info(environ, parent)
    if comm is None or comm == []:
        return _over_mpi(info, config)
    if not isinstance(comm, Sequence) or not all(isinstance(rank, int) for rank in comm):
        raise UnsupportedError(f"comm must be an mpi4py communicator or a list of ranks, not {comm!r}")
    return _by_ranks(info, list(comm))


def _by_communicator(comm: Any, key: bytes) -> LaunchInfo:
    module = mpi.load()
    if comm == module.COMM_NULL:
        raise UnsupportedError("comm is MPI's null communicator: this rank is not in it, and must not call init() with it")
    mpi.check_thread_level(module, comm)
    return launch_info_over_mpi(module, comm.Dup(), key=key)


def _over_mpi(info: LaunchInfo, config: Config) -> LaunchInfo:
    """Complete launch information over MPI, if needed and possible; an elastic job does without."""
    if info.world.epoch:
        return info
    needs_key = info.on_several_hosts and not (info.key and info.coordinator)
    across = info.on_several_hosts and config.cpu_operations == "auto"
    wanted = config.cpu_operations == "mpi" or (info.is_mpi and (across or config.cpu_operations == "hierarchical"))
    if info.world.size == 1 or not (wanted or needs_key or not info.knows_local_ranks):
        return info
    mismatch = mpi.world_mismatch(info.world.rank, info.world.size)
    if mismatch and (needs_key or not info.knows_local_ranks):
        raise LaunchError(f"{info.environment}: the ranks are on several hosts and need MPI to find each other, but "
                          f"{mismatch}. Or set {SECRET} and HVDLITE_COORDINATOR=host:port to the same on all ranks; "
                          f"{MAKE_A_KEY}")
    if mismatch:
        return dataclasses.replace(info, mpi_problem=mismatch)
    module = mpi.load()
    communicator = module.COMM_WORLD.Dup()
    mpi.check_thread_level(module, communicator)
    if info.is_mpi and not info.is_complete:
        return launch_info_over_mpi(module, communicator, info.coordinator, info.key)
    return dataclasses.replace(info, communicator=communicator)


def _by_ranks(info: LaunchInfo, ranks: list[int]) -> LaunchInfo:
    """Return this rank's launch information in a job of some ranks only."""
    world = info.world
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world.size)):
        raise UnsupportedError(f"comm={ranks} must contain ranks from 0..{world.size - 1}, each once")
    if world.rank not in ranks:
        raise UnsupportedError(f"comm={ranks} does not contain this rank, {world.rank}; call init() with a list that "
                               "contains it")
    if ranks == list(range(world.size)):
        return info
    if info.is_mpi and not mpi.world_mismatch(world.rank, world.size):
        module = mpi.load()
        everybody = module.COMM_WORLD
        some = everybody.Create_group(everybody.Get_group().Incl(ranks), ranks[0])
        mpi.check_thread_level(module, some)
        return launch_info_over_mpi(module, some, key=info.key)
    if info.on_several_hosts:
        raise UnsupportedError(f"comm={ranks} on several hosts needs MPI: start the job with mpirun, or call init() with "
                               "all ranks and use process sets")
    index = ranks.index(world.rank)
    return dataclasses.replace(info, world=World(index, len(ranks), index, len(ranks)),
                               job_directory=agreed_prefix(info.job_directory, repr(ranks)), owns_directory=True)
