"""Ranks inside long-lived worker processes of another system; shared by the Ray and Spark integrations.

A worker receives its rank as environment variables, and a function to call as that rank. Its interpreter outlives the
function, so a failure is reported to the other ranks explicitly.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hvdlite import api
from hvdlite.core import launch_contract
from hvdlite.core.errors import PeerLostError
from hvdlite.core.own_programs import NOT_HERE
from hvdlite.core.world import Hosts, World

_CLEANUP_PROGRAM = NOT_HERE + "import shutil; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
"""Removes a directory once its standard input is closed, which happens when the owner exits."""


def assign_ranks(nodes: Sequence[str]) -> list[tuple[int, World]]:
    """Return the worker index and the coordinates of each rank; the ranks of one node are consecutive.

    Args:
        nodes: an identifier of each worker's node.
    """
    first = {node: nodes.index(node) for node in nodes}
    order = sorted(range(len(nodes)), key=lambda worker: (first[nodes[worker]], worker))
    hosts = Hosts.of([nodes[worker] for worker in order])
    return [(worker, hosts.world(rank)) for rank, worker in enumerate(order)]


def rank_variables(world: World, directory: str, coordinator: str, secret: str) -> dict[str, str]:
    """Return a rank's environment variables; the coordinator is included on several hosts only."""
    where = {launch_contract.COORDINATOR: coordinator} if world.local_size < world.size else {}
    return {**launch_contract.rank_environment(world, directory), launch_contract.SECRET: secret, **where}


class TemporaryJobDirectory:
    """The rendezvous directory of this host's ranks; removed by `remove`, or when this process exits for any reason."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=launch_contract.DIRECTORY_PREFIX)  # mode 0700
        self._cleanup = subprocess.Popen([sys.executable, "-S", "-E", "-c", _CLEANUP_PROGRAM, self.path],
                                         stdin=subprocess.PIPE, start_new_session=True)

    def remove(self) -> None:
        """Remove the directory and the failure records in it."""
        self._cleanup.communicate()


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function as a rank: an exception is reported to the other ranks, which then stop waiting for this one."""
    try:
        return func(*args, **kwargs)
    except BaseException as error:
        api.fail(error)
        raise


@contextlib.contextmanager
def as_rank(variables: Mapping[str, str]) -> Iterator[None]:
    """Make this process a rank of a job within a `with` block, and shut the runtime down afterwards."""
    before = dict(os.environ)
    os.environ.update(variables)
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
    """Return the error to raise for several failed ranks: one that is not the consequence of another."""
    own = [rank for rank, error in sorted(errors.items()) if not isinstance(error, PeerLostError)]
    return errors[own[0] if own else min(errors)]
