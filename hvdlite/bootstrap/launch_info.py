"""How this process enters a job: by its environment, over MPI, or as a member of what was given to `init`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.bootstrap.environments import MAKE_A_KEY, Place, find_place
from hvdlite.bootstrap.mpi import place_over_mpi
from hvdlite.core.config import Config
from hvdlite.core.errors import LaunchError, UnsupportedError
from hvdlite.core.launch_contract import SECRET
from hvdlite.core.world import World
from hvdlite.planes import mpi


def resolve_launch(comm: object, environ: Mapping[str, str], parent: int, config: Config) -> Place:
    """Return this process's place.

    Args:
        comm: as for `api.init`.
        parent: as for `find_place`.

    Raises:
        LaunchError: when the place cannot be found out.
        UnsupportedError: for a `comm` that is none, or a rank that is not in it.
    """
    if hasattr(comm, "Get_group"):
        return _by_communicator(comm)
    place = find_place(environ, parent)
    if comm is None or comm == []:
        return _over_mpi(place, config)
    if not isinstance(comm, Sequence) or not all(isinstance(rank, int) for rank in comm):
        raise UnsupportedError(f"comm must be an mpi4py communicator or a list of ranks, not {comm!r}")
    return _by_ranks(place, list(comm))


def _by_communicator(comm: Any) -> Place:
    module = mpi.load()
    if comm == module.COMM_NULL:
        raise UnsupportedError("comm is MPI's null communicator: this rank is not in it, and must not call init() with it")
    mpi.check_threads(module, comm)
    return place_over_mpi(module, comm.Dup())


def _over_mpi(place: Place, config: Config) -> Place:
    """Complete a place over MPI, where that is needed and possible."""
    needs_key = place.on_several_hosts and not (place.key and place.coordinator)
    across = place.on_several_hosts and config.cpu_operations == "auto"
    wanted = config.cpu_operations == "mpi" or (place.is_mpi and (across or config.cpu_operations == "hierarchical"))
    if place.world.size == 1 or not (wanted or needs_key or not place.knows_local):
        return place
    unfit = mpi.unfit(place.world.rank, place.world.size)
    if unfit and (needs_key or not place.knows_local):
        raise LaunchError(f"{place.environment}: the ranks are on several hosts and need MPI to find each other, but "
                          f"{unfit}. Or set {SECRET} and HVDLITE_COORDINATOR=host:port to the same on all ranks; "
                          f"{MAKE_A_KEY}")
    if unfit:
        return dataclasses.replace(place, without_mpi=unfit)
    module = mpi.load()
    communicator = module.COMM_WORLD.Dup()
    mpi.check_threads(module, communicator)
    if place.is_mpi and not place.is_launched:
        return place_over_mpi(module, communicator, place.coordinator)
    return dataclasses.replace(place, communicator=communicator)


def _by_ranks(place: Place, ranks: list[int]) -> Place:
    """Return this rank's place in a job of some ranks only."""
    world = place.world
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world.size)):
        raise UnsupportedError(f"comm={ranks} must name ranks from 0..{world.size - 1}, each once")
    if world.rank not in ranks:
        raise UnsupportedError(f"comm={ranks} does not have this rank, {world.rank}; call init() with a list that has it")
    if ranks == list(range(world.size)):
        return place
    if place.is_mpi and not mpi.unfit(world.rank, world.size):
        module = mpi.load()
        everybody = module.COMM_WORLD
        some = everybody.Create_group(everybody.Get_group().Incl(ranks), ranks[0])
        mpi.check_threads(module, some)
        return place_over_mpi(module, some)
    if place.on_several_hosts:
        raise UnsupportedError(f"comm={ranks} on several hosts needs MPI: start the job with mpirun, or call init() with "
                               "all ranks and use process sets")
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:8]
    index = ranks.index(world.rank)
    return dataclasses.replace(place, world=World(index, len(ranks), index, len(ranks)),
                               job_directory=f"{place.job_directory}-{digest}", owns_directory=True)
