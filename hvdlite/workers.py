"""Ranks inside processes that somebody else started and keeps: what Ray and Spark have in common.

Such a process gets its place as variables, and a function to call as a rank. Its interpreter does not end with the function,
so a failure is told to the other ranks explicitly.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hvdlite import api
from hvdlite.core import launch_contract
from hvdlite.core.errors import PeerLostError
from hvdlite.core.world import Hosts, World

_CLEANUP_PROGRAM = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
"""Waits for the end of whoever holds the other end of its standard input."""


def assign_ranks(nodes: Sequence[str]) -> list[tuple[int, World]]:
    """Return, for each rank, which worker it is and where it stands; ranks of one node follow each other.

    Args:
        nodes: something that names each worker's node.
    """
    first = {node: nodes.index(node) for node in nodes}
    order = sorted(range(len(nodes)), key=lambda worker: (first[nodes[worker]], worker))
    hosts = Hosts.of([nodes[worker] for worker in order])
    return [(worker, hosts.world(rank)) for rank, worker in enumerate(order)]


def rank_variables(world: World, directory: str, coordinator: str, secret: str) -> dict[str, str]:
    """Return a rank's variables; coordinator and key only matter on several hosts."""
    meeting = {launch_contract.COORDINATOR: coordinator, launch_contract.SECRET: secret}
    return {**launch_contract.rank_environment(world, directory), **(meeting if world.local_size < world.size else {})}


class JobDirectory:
    """A directory where the ranks of this host meet; gone when this process calls `remove`, or ends in any way."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=launch_contract.DIRECTORY_PREFIX)  # mode 0700
        self._cleanup = subprocess.Popen([sys.executable, "-S", "-E", "-c", _CLEANUP_PROGRAM, self.path],
                                         stdin=subprocess.PIPE, start_new_session=True)

    def remove(self) -> None:
        """Remove it with what failed ranks left there."""
        self._cleanup.communicate()


def free_port() -> int:
    """Return a port that is free at the moment, on all addresses."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function as a rank: when it raises, the other ranks hear of it and do not wait for this one."""
    try:
        return func(*args, **kwargs)
    except BaseException as error:
        api.fail(error)
        raise


@contextlib.contextmanager
def as_rank(given: Mapping[str, str]) -> Iterator[None]:
    """Give this process a place in a job for a while, and leave the job afterwards."""
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        shut_down()
        os.environ.clear()
        os.environ.update(before)


def shut_down() -> None:
    """Shut this process's runtime down, however often it was initialised."""
    while api.is_initialized():
        api.shutdown()


def root_error(errors: Mapping[int, BaseException]) -> BaseException:
    """Return what to raise of several ranks' errors: one that is not the consequence of another."""
    own = [rank for rank, error in sorted(errors.items()) if not isinstance(error, PeerLostError)]
    return errors[own[0] if own else min(errors)]
