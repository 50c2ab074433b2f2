"""The calls of a training script other than collectives: init, shutdown, ranks and sizes, process sets, diagnostics.

This module owns the process's one `Runtime`, which all frontends share, and the exit, exception, signal and fork hooks that
end it properly (docs/protocol.md#one-runtime).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.bootstrap.environments import LaunchInfo, check_host, torch_variables
from hvdlite.bootstrap.store import KeyValues
from hvdlite.core import launch_contract
from hvdlite.core.array import Array
from hvdlite.core.config import environment_name
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import ProcessSet
from hvdlite.core.types import ReduceOp
from hvdlite.groups.group import Group
from hvdlite.groups.groups import Groups
from hvdlite.runtime.followers import Follower
from hvdlite.runtime.process_hooks import answer_signal, leaves_because_of, report_uncaught, tell_failure
from hvdlite.runtime.runtime import Runtime
from hvdlite.runtime.worlds import Worlds

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

_worlds = Worlds(os.environ)
_lock = threading.RLock()
_users = 0  # init() calls that no shutdown() has answered yet
_hooks_installed = False


def init(comm: object = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Join the job that the environment describes; without one, run alone (size 1).

    Further calls share the runtime, and as many `shutdown()` calls end it. A call that fails leaves nothing behind; the
    other ranks receive the reason. After they have called `shutdown()`, all can call `init()` again.

    Args:
        comm: the job's ranks: None or [] for all, an mpi4py communicator (which is duplicated), or a list of ranks that
            contains this one; its first entry becomes rank 0. Further calls ignore it.
        process_sets: process sets to register, or lists of their ranks; the same on all ranks. More can be added later
            (Horovod's "dynamic" is accepted, and always on).

    Raises:
        LaunchError: when the launch environment is incomplete or the ranks cannot meet.
        ConfigError: for an unknown or invalid `HVDLITE_*` variable.
        UnsupportedError: for a communicator, ranks or process sets that do not fit the job.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets must be a list of ProcessSet or "dynamic", not {process_sets!r}')
    _join(comm, None, () if process_sets is None or isinstance(process_sets, str) else process_sets)


def _join(comm: object, info: LaunchInfo | None, process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
    """Count a user of the runtime, and join the job if nobody uses it yet; what fails leaves nothing behind."""
    global _users
    try:
        with _lock:
            _users += 1
            if not _worlds.is_initialized:
                _users = 1
                _install_hooks()
                answer_signal(_worlds.join(comm, info).report_signal, lambda: _worlds.runtime)
        for process_set in process_sets:
            if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
                add_process_set(process_set)
    except BaseException as error:
        with _lock:
            if _users == 1 and _worlds.runtime is not None:  # nobody else uses it
                tell_failure(_worlds.runtime, error)
            shutdown()
        raise


def shutdown() -> None:
    """Leave the job; rank 0 waits for the other ranks to leave. Several `init()` calls need as many `shutdown()` calls.

    Process sets are then unregistered; you can register them again after another `init()`.
    """
    begin_to_leave()
    if _users <= 1 and isinstance(sys.exc_info()[1], (SystemExit, type(None))):
        for finish in _to_finish:
            finish()
    _release(waits=True)


_to_finish: list[Callable[[], None]] = []


def finish_before_leaving(finish: Callable[[], None]) -> None:
    """Call a function before this process leaves the job, unless it fails: it waits for what all ranks do together."""
    if finish not in _to_finish:
        _to_finish.append(finish)


def begin_to_leave() -> None:
    """This process leaves the job or a group now: if it handles an exception that will end it, that is when it failed."""
    error = sys.exc_info()[1]
    if error is not None:
        leaves_because_of(error)


def _release(*, waits: bool) -> None:
    global _users
    with _lock:
        _users = max(0, _users - 1)
        if not _users:
            _groups.leave_world()
            _worlds.leave(waits=waits)


_groups = Groups(_worlds, lambda info: _join(None, info, ()), lambda: _release(waits=False))


def runtime() -> Runtime:
    """Return the process's runtime.

    Raises:
        NotInitializedError: before `init()` and after `shutdown()`; in an elastic job between two worlds.
    """
    return _worlds.current()


def worlds() -> Worlds:
    """Return this process's worlds, for `elastic.run`."""
    return _worlds


def is_provisional() -> bool:
    """Return whether this process is in no world of its elastic job: it joins the job, or its world has ended.

    Then `rank()` and `size()` are provisional, and broadcasts of a state return what they were given: `hvd.elastic.run`
    synchronises the state. A process that joins is alone in its collectives.
    """
    return _worlds.waiting is not None


def attached_runtime() -> Runtime | None:
    """Like `runtime`; None between two worlds of an elastic job: followers get the runtime when the next one begins."""
    return _worlds.runtime if is_provisional() else runtime()


def is_elastic() -> bool:
    """Return whether the launcher may change the number of ranks while this process lives."""
    return _worlds.member is not None


def follow(follower: Follower) -> None:
    """Tell an object of the ends and beginnings of worlds, as long as it lives: objects in order of construction."""
    _worlds.followers.add(follower)


def story(name: str) -> str:
    """Return the last events of a tensor on this rank, one per line, oldest first; "" if there are none.

    Args:
        name: as given to the collective, or as errors and stall reports call it. Members of a learned bucket are known by
            the names of the optimizer's parameters.
    """
    return runtime().recorder.story(name)


def record_step(samples: int) -> None:
    """Count a training step over `samples` samples of this rank; takes a microsecond.

    `hvdrun --monitor` shows samples per second, `--scaling` and `--sweep` compare them; else they count optimizer steps.

    Args:
        samples: how many of them this rank's part of the batch had, at least 0.

    Raises:
        ValueError: for a negative number.
    """
    if samples < 0:
        raise ValueError(f"a step cannot be over {samples} samples")
    runtime().progress.step(samples)


def record_metrics(metrics: Mapping[str, Any], epoch: float) -> None:
    """Record the results of an evaluation, for `hvdrun --sweep ... --until`, which compares how soon runs reach a value.

    Call it after each evaluation. Of several ranks' records, rank 0's count: pass what the ranks have averaged.

    Args:
        metrics: numbers by name, such as `{"accuracy": 0.88, "lr": 0.02}`; NaN is allowed.
        epoch: the number of epochs trained so far; may be a fraction.

    Raises:
        ValueError: for a metric that is not a number, or an epoch below 0.
    """
    runtime().progress.record_metrics(metrics, epoch)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of all ranks to a file on rank 0's host, in Chrome's trace format, until `stop_timeline`.

    Rank 0's call starts the timeline on all ranks at the same point; on other ranks the call does nothing. A second call
    with the same file does nothing; one with another file closes the first file.

    Args:
        file_path: the file, which is overwritten. It is valid JSON after every write. Open it with https://ui.perfetto.dev
            or chrome://tracing.
        mark_cycles: whether to show decisions, which correspond to Horovod's cycles.

    Raises:
        ConfigError: when the file cannot be written.
    """
    runtime().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline; on rank 0, return when its file is complete."""
    runtime().stop_timeline()


def offer_casts(widen: Callable[[Array, Array], object], narrow: Callable[[Array, Array], object],
                reduce_pair: Callable[[Array, Array, int, Array], bool]) -> None:
    """Let reductions of 16-bit floats use a framework's vectorised kernels; see `planes.arithmetic.Casts`."""
    _worlds.casts.widen, _worlds.casts.narrow, _worlds.casts.reduce_pair = widen, narrow, reduce_pair


def is_initialized() -> bool:
    """Return whether the runtime is running: `init()` has been called, and the last `shutdown()` has not."""
    return _worlds.is_initialized


def rank() -> int:
    """Return this process's rank, 0..size()-1."""
    return _worlds.coordinates.rank


def size() -> int:
    """Return the number of processes of the job."""
    return _worlds.coordinates.size


def local_rank() -> int:
    """Return this process's number among the processes of its host."""
    return _worlds.coordinates.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return _worlds.coordinates.local_size


def slot() -> int:
    """Return the slot of its host that this process has in an elastic job, whatever its rank becomes; else `local_rank()`.

    Choose a GPU by it.
    """
    own = os.environ.get(launch_contract.SLOT)
    return local_rank() if own is None else int(own)


def cross_rank() -> int:
    """Return this host's number among the hosts that have a process with this local rank."""
    return _worlds.coordinates.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return _worlds.coordinates.cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return is_provisional() or runtime().hosts.is_homogeneous


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set and return it; all ranks of the job call this, in the same order, members or not.

    Args:
        process_set: a `ProcessSet`, or a list of its ranks.

    Raises:
        UnsupportedError: for ranks that do not exist, or a set that exists already.
        MismatchError: when ranks disagree about the members.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.process_set_id is not None:
        raise UnsupportedError(f"{made} is already registered")
    _worlds.add_process_set(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the job call this. Return False for the global set and for unregistered ones.

    Args:
        process_set: as `add_process_set` has returned it.

    Raises:
        MismatchError: if ranks name different sets; also raised by work that was still pending in the set.
    """
    if not process_set.registered_ids:
        return False
    _worlds.remove_process_set(process_set)
    return True


def set_default(knob: str, value: str) -> None:
    """Set a knob's default from the next `init` on; an argument or the environment takes precedence."""
    _worlds.defaults[environment_name(knob)] = value


def set_id(process_set: ProcessSet) -> int:
    """Return the id of a registered process set.

    Raises:
        UnsupportedError: when it is not registered, or something else.
    """
    if not isinstance(process_set, ProcessSet):
        raise UnsupportedError(f"process_set must be a ProcessSet, as hvd.add_process_set returns, not {process_set!r}")
    if process_set.process_set_id is None:
        raise UnsupportedError(f"{process_set} is not registered; call hvd.add_process_set on all ranks first")
    return process_set.process_set_id


def set_torch_variables() -> None:
    """Set the variables by which `torch.distributed` finds the ranks; see `bootstrap.environments.torch_variables`."""
    found = torch_variables(os.environ, os.getppid())
    check_host(found.get("MASTER_ADDR", ""))
    os.environ.update(found)


def join_group(store: KeyValues, name: str, rank: int, size: int, timeout: float,
               members: Sequence[int] | None = None) -> Group:
    """Meet the other ranks of a group whose collectives are carried out in the order of calls; all of them call this.

    Args:
        store: of this group alone, the same for all its ranks.
        name: for messages, and of the group's thread.
        rank: this process's rank in the group.
        size: number of ranks of the group.
        timeout: seconds after which a call fails on a rank that still waits.
        members: for messages: the ranks of the world that are the group's, in its order; None if it is the whole world.

    Raises:
        LaunchError: when the ranks cannot meet.
        ForkedProcessError: in a process that was forked from a rank.
        ConfigError: for an unknown or invalid `HVDLITE_*` variable.
        ValueError: for a rank that is not in the group.
    """
    with _lock:
        _install_hooks()
    return _groups.join(store, name, rank, size, timeout, members)


def open_group(name: str, ranks: Sequence[int], timeout: float = 1800.0) -> Group:
    """Make a group of ranks of this process's world, whose collectives are carried out in the order of calls.

    All of these ranks call this. In an elastic job the group belongs to the present world, and fails with it.

    Args:
        name: the same on all of them, for messages; another one for each group that is made at the same time.
        ranks: of the world: those of the group, in its order.
        timeout: seconds after which the meeting, and later a call, fails on a rank that still waits; by default as many as
            in `torch.distributed`.

    Raises:
        NotInitializedError: before `init()`, and between two worlds.
        ValueError: if this rank is not one of `ranks`, or they are not ranks of the world.
        LaunchError: when they do not agree, or do not come in time.
        PeerLeftError: when one of them has left the job.
        HorovodInternalError: when the job fails meanwhile.
    """
    return _groups.open(name, ranks, timeout)


def _install_hooks() -> None:
    """Install the hooks for the end of the process; the first init() or group does."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_worlds.close_in_child)
    os.register_at_fork(after_in_child=_groups.close_in_child)
    report_uncaught(_end_with)


def _end_with(error: BaseException, *, prints: bool) -> bool:
    has_printed = _worlds.fail(error, prints=prints)
    if has_printed or not prints:
        _groups.fail(error)
    return has_printed


def fail(error: BaseException) -> None:
    """Notify the other ranks that this one fails, where the interpreter does not: inside a worker of Ray or Spark."""
    _worlds.fail(error)


def _at_exit() -> None:
    global _users
    _groups.close_all()  # first: the last one that uses the runtime leaves the job
    with _lock:
        _users = 0
    shutdown()
