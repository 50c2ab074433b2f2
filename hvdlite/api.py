"""The calls of a training script other than collectives: init, shutdown, ranks and sizes, process sets, diagnostics.

This module owns the process's one `Runtime`, which all frontends share, and the exit, exception, signal and fork hooks that
end it properly (docs/protocol.md#one-runtime).
"""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Protocol

import numpy as np

from hvdlite.bootstrap.launch_info import resolve_launch
from hvdlite.bootstrap.mpi import lowest_rank
from hvdlite.core import launch_contract
from hvdlite.core.array import Array
from hvdlite.core.config import Config, environment_name
from hvdlite.core.errors import NotInitializedError, PeerLostError, UnsupportedError
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.stack_dump import StackDumpTarget
from hvdlite.core.types import ReduceOp
from hvdlite.core.world import World
from hvdlite.diagnostics.process_probe import enable_stack_dump
from hvdlite.planes.arithmetic import Casts
from hvdlite.runtime.assemble import assemble
from hvdlite.runtime.runtime import Runtime

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

_lock = threading.RLock()
_runtime: Runtime | None = None
_users = 0  # init() calls that no shutdown() has answered yet
_hooks_installed = False
_stack_dump: StackDumpTarget | None = None  # where this process writes its stacks
_casts = Casts.of_numpy()
_defaults: dict[str, str] = {}  # environment variables of knobs, as if they were set when they are not
_process_sets: set[ProcessSet] = set()  # registered with the runtime, and meaningless after it
_awaits_world = False  # this process has joined a running elastic job, and has no world yet
_followers: weakref.WeakValueDictionary[int, Follower] = weakref.WeakValueDictionary()  # in order of construction
_follower_ids = itertools.count()


class Follower(Protocol):
    """An object of the script that lives longer than a world, such as an optimizer."""

    def world_ended(self) -> None:
        """Let go of the runtime, which has ended, and of all that belongs to it. May be called again."""

    def world_began(self, runtime: Runtime) -> None:
        """Take part in the world of a runtime, which has started."""


def init(comm: object = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Join the job that the environment describes; without one, run alone (size 1).

    Further calls share the runtime, and the same number of `shutdown()` calls ends it. A call that fails does not count and
    leaves nothing behind. The other ranks are told the reason; after they have called `shutdown()`, all can call `init()`
    again.

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
    global _runtime, _users
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets must be a list of ProcessSet or "dynamic", not {process_sets!r}')
    with _lock:
        if _runtime is None:
            _runtime, _users = _started(comm), 0
            global_process_set.set_members(_runtime.world.size, _runtime.world.rank)
            _world_began()
        _users += 1
    try:
        for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
                add_process_set(process_set)
    except BaseException as error:
        with _lock:
            if _users == 1 and _runtime is not None:  # nobody else uses it
                _tell(_runtime, error)
            shutdown()
        raise


def _started(comm: object) -> Runtime:
    """Return a runtime that is running, with all that the environment asks for; nothing is left of one that fails."""
    config = Config.from_environment({**_defaults, **os.environ})
    info = resolve_launch(comm, os.environ, os.getppid(), config)
    _configure_logging(config, info.world)
    made = assemble(info, config, _casts, _enable_stack_dump(config), os.environ)
    made.start()
    try:
        if info.job_directory and not info.owns_directory:
            made.progress.publish(info.job_directory, info.world.rank)
        if config.timeline:
            made.start_timeline(config.timeline, config.timeline_mark_cycles)
        _install_hooks()
        _answer_signal(config.report_signal)
    except BaseException as error:
        _tell(made, error)
        made.shutdown()
        made.progress.withdraw()
        raise
    return made


def shutdown() -> None:
    """Leave the job; rank 0 waits for the other ranks to leave. Several `init()` calls need as many `shutdown()` calls.

    Process sets are then unregistered; you can register them again after another `init()`.
    """
    global _runtime, _users
    with _lock:
        _users = max(0, _users - 1)
        if _runtime is not None and _users == 0:
            _runtime.shutdown()
            _runtime.progress.withdraw()
            _runtime = None
            for process_set in _process_sets:
                process_set.register(None, None)
            _process_sets.clear()


def runtime() -> Runtime:
    """Return the process's runtime.

    Raises:
        NotInitializedError: before `init()` and after `shutdown()`.
    """
    if _runtime is None:
        raise NotInitializedError("hvdlite is not initialised; call hvd.init() first")
    return _runtime


def attached_runtime() -> Runtime | None:
    """Like `runtime`; None in a process that has joined an elastic job and has no world yet: followers get it then."""
    return None if _awaits_world else runtime()


def follow(follower: Follower) -> None:
    """Tell an object of the ends and beginnings of worlds, as long as it lives: objects in order of construction."""
    _followers[next(_follower_ids)] = follower


def _world_ended() -> None:
    """Let followers go of a runtime that has ended; its memory is unmapped when this returns."""
    for follower in list(_followers.values()):
        follower.world_ended()
    gc.collect()  # what is left of the runtime is in cycles


def _world_began() -> None:
    """Let the followers that live take part in the world of the present runtime; nothing is left of another one."""
    if _followers:
        _world_ended()  # which a mere shutdown() does not; and followers that were dropped are gone on all ranks alike
    for follower in list(_followers.values()):
        follower.world_began(runtime())


def story(name: str) -> str:
    """Return the last events of a tensor on this rank, one per line, oldest first; "" if there are none.

    Args:
        name: as given to the collective, or as errors and stall reports call it. Members of a learned bucket are known by
            the names of the optimizer's parameters.
    """
    return runtime().story(name)


def record_step(samples: int) -> None:
    """Count a training step over `samples` samples of this rank; takes a microsecond.

    `hvdrun --monitor` shows samples per second; `--scaling` and `--sweep` compare them. Without these calls they count
    optimizer steps.

    Raises:
        ValueError: for a negative number.
    """
    if samples < 0:
        raise ValueError(f"a step cannot be over {samples} samples")
    runtime().progress.step(samples)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of all ranks to a file on rank 0's host, in Chrome's trace format, until `stop_timeline`.

    Rank 0's call starts the timeline on all ranks at the same point; on other ranks the call does nothing. A second call
    with the same file does nothing; one with another file closes the first file.

    Args:
        file_path: the file, which is overwritten. It is valid JSON at any time; open it with https://ui.perfetto.dev or
            chrome://tracing.
        mark_cycles: whether to show decisions, which correspond to Horovod's cycles.

    Raises:
        ConfigError: when the file cannot be written.
    """
    runtime().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline; on rank 0, return when its file is complete."""
    runtime().stop_timeline()


def offer_casts(widen: Callable[[Array, Array], object], narrow: Callable[[Array, Array], object]) -> None:
    """Let reductions of 16-bit floats use a framework's vectorised conversions; see `planes.arithmetic.Casts`."""
    _casts.widen, _casts.narrow = widen, narrow


def boundary() -> None:
    """Stub."""


def is_initialized() -> bool:
    """Return whether the runtime is running: `init()` has been called, and the last `shutdown()` has not."""
    return _runtime is not None


def rank() -> int:
    """Return this process's rank, 0..size()-1."""
    return runtime().world.rank


def size() -> int:
    """Return the number of processes of the job."""
    return runtime().world.size


def local_rank() -> int:
    """Return this process's number among the processes of its host."""
    return runtime().world.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return runtime().world.local_size


def cross_rank() -> int:
    """Return this host's number among the hosts that have a process with this local rank."""
    return runtime().world.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return runtime().world.cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return runtime().hosts.is_homogeneous


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set and return it; all ranks of the job call this, in the same order, members or not.

    Raises:
        UnsupportedError: for ranks that do not exist, or a set that exists already.
        MismatchError: when ranks disagree about the members.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.process_set_id is not None:
        raise UnsupportedError(f"{made} is already registered")
    current = runtime()
    if made.mpi_comm is not None:
        _register_split(made, current)
    else:
        made.register(current.add_process_set(made.ranks or ()).wait(), current.world.rank)
    _process_sets.add(made)
    return made


def _register_split(own: ProcessSet, current: Runtime) -> None:
    """Register the communicators that the ranks are in; each is known by its least rank."""
    rank = current.world.rank
    least = lowest_rank(own.mpi_comm, rank)
    everybodys = current.allgather(current.unnamed("process_set", "split"), np.array([least])).wait().tolist()
    parts = {each: [member for member, other in enumerate(everybodys) if other == each]
             for each in sorted(set(everybodys)) if each >= 0}
    ids = {each: current.add_process_set(members).wait() for each, members in parts.items()}
    own.ranks = parts.get(least, [])
    own.register(ids.get(least), rank, list(ids.values()))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the job call this. Return False for the global set and for unregistered ones.

    Raises:
        MismatchError: if ranks name different sets; also raised by work that was still pending in the set.
    """
    if not process_set.registered_ids:
        return False
    for set_id in process_set.registered_ids:
        runtime().remove_process_set(set_id).wait()
    process_set.register(None, None)
    _process_sets.discard(process_set)
    return True


def set_default(knob: str, value: str) -> None:
    """Set a knob's default from the next `init` on; an argument or the environment takes precedence."""
    _defaults[environment_name(knob)] = value


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


def reduce_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation that Horovod's arguments `op` and `average` select; the default is Average.

    Raises:
        ValueError: when both are given.
    """
    if average is not None:
        if op is not None:
            raise ValueError("pass either op or the deprecated average, not both")
        warnings.warn("average is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else ReduceOp(op)


def negotiated_name(adapter: str, kind: str, name: str | None, process_set: ProcessSet) -> str:
    """Return the name under which a frontend's collective is negotiated: Horovod's, or by the order of calls without one."""
    return runtime().unnamed(adapter, kind, set_id(process_set)) if name is None else f"{kind}.{name}"


def member_names(base: str, count: int) -> list[str]:
    """Return Horovod's names for the members of a group."""
    return [f"{base}_{index}of{count}" for index in range(1, count + 1)]


def transfer_name(adapter: str, name: str | None, sender: int, receiver: int) -> str:
    """Return the name under which a tensor from one rank to another is negotiated."""
    way = f"{sender}to{receiver}"
    return runtime().unnamed(adapter, f"send.{way}") if name is None else f"send.{way}.{name}"


# --- hooks: installed once, by the first init() ----------------------------------------------------------------------


def _configure_logging(config: Config, world: World) -> None:
    logger = logging.getLogger("hvdlite")
    logger.setLevel(config.log_level)
    if not logger.handlers and not logging.getLogger().handlers:  # a script with its own logging keeps it
        handler = logging.StreamHandler()
        when = "" if config.log_hide_time else "%(asctime)s "
        handler.setFormatter(logging.Formatter(f"{when}[{world.rank}] %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def _enable_stack_dump(config: Config) -> StackDumpTarget:
    """Let rank 0 see where this process is when it does not answer; once, it lasts as long as the process."""
    global _stack_dump
    if _stack_dump is None:
        _stack_dump = enable_stack_dump(config.traceback_signal)
    return _stack_dump


def _answer_signal(signum: int) -> None:
    """Let a signal ask for a report, unless the script has a use for it."""
    if not signum:
        return
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signum) is not signal.SIG_DFL:
        logging.getLogger("hvdlite").warning("signal %d does not ask for reports (HVDLITE_REPORT_SIGNAL): it is handled "
                                             "already, or init() was not called in the main thread", signum)
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        current = _runtime
        if current is not None and not current.in_child:
            current.request_report()

    signal.signal(signum, ask)


def _install_hooks() -> None:
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_in_child)
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> Any:
        previous(kind, error, where)  # first: the cause is on the screen before the others hear of it
        sys.stderr.flush()
        _report_failure(error)

    sys.excepthook = excepthook


def fail(error: BaseException) -> None:
    """Tell the other ranks that this one fails, where the interpreter will not: inside a worker of Ray or Spark, say."""
    _report_failure(error)


def _report_failure(error: BaseException) -> None:
    """Tell the other ranks and the launcher that this one ends with an exception."""
    current = _runtime
    if current is None or current.in_child:
        return
    origin, text = _tell(current, error)
    directory = os.environ.get(launch_contract.JOB_DIRECTORY)
    if directory:
        launch_contract.FailureRecord(current.world.rank, origin, time.time(), type(error).__name__, str(error),
                                      text).write(directory)


def _tell(current: Runtime, error: BaseException) -> tuple[int, str]:
    """Tell the other ranks of an exception; return the rank where it began, and its traceback as text."""
    text = "".join(traceback.format_exception(error))
    suffered = [known.rank for known in (*_causes(error), current.failure)
                if isinstance(known, PeerLostError) and known.rank >= 0]
    origin = suffered[0] if suffered else current.world.rank
    current.fail(type(error).__name__, str(error), text, origin)
    return origin, text


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _at_exit() -> None:
    global _users
    with _lock:
        _users = 0
    shutdown()


def _in_child() -> None:
    if _runtime is not None:
        _runtime.close_in_child()
