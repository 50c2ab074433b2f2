"""The worlds of a process: one in most jobs; in an elastic job one after the other.

Rules: docs/protocol.md#epochs, #the-end-of-a-world. A process that joins an elastic job runs as a single-rank world until
it is admitted, so that what a script does before `elastic.run` works there too (decision 34).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping

from hvdlite.bootstrap.environments import JobKey, LaunchInfo
from hvdlite.bootstrap.launch_info import resolve_launch
from hvdlite.bootstrap.member_client import MemberClient
from hvdlite.bootstrap.rendezvous import Cancellation
from hvdlite.core import launch_contract
from hvdlite.core.config import Config, environment_name
from hvdlite.core.errors import ConfigError, HorovodInternalError, LaunchError, NotInitializedError, UnsupportedError
from hvdlite.core.launch_contract import StackDumpTarget
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.world import Hosts, World
from hvdlite.diagnostics.process_probe import enable_stack_dump
from hvdlite.membership.messages import WorldOrder
from hvdlite.planes.arithmetic import Casts
from hvdlite.runtime import tracebacks
from hvdlite.runtime.assemble import Learned, assemble
from hvdlite.runtime.followers import Followers
from hvdlite.runtime.process_hooks import (
    StopNotice,
    configure_logging,
    origin_of,
    record_failure,
    shorten_uncaught,
    tell_failure,
)
from hvdlite.runtime.registered_sets import RegisteredSets
from hvdlite.runtime.runtime import Runtime

_log = logging.getLogger("hvdlite")


class Worlds:
    """The world of this process, and what outlives it. Only user threads call it; not two at a time.

    Args:
        environ: the process's environment; the job's key is removed from it, and in an elastic job coordinates are rewritten
            with each world.

    Attributes:
        runtime: this process's runtime; None without a world.
        waiting: the coordinates of a member of an elastic job while it is in no world of the job: provisional ones, or those
            of the last world.
        member: this process as a member of an elastic job; None in other jobs. Lasts as long as the process.
        followers: the objects of the script that follow worlds.
        casts: conversions of 16-bit floats.
        defaults: environment variables of knobs, as if they were set when they are not.
        runs_elastically: whether `hvd.elastic.run` is running.
        stop_notice: whether this process has been asked to stop.
        steps_begun: how many steps optimizers of this process have begun: parameters may have changed with each.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self.runtime: Runtime | None = None
        self.waiting: World | None = None
        self.member: MemberClient | None = None
        self.followers = Followers()
        self.casts = Casts.of_numpy()
        self.defaults: dict[str, str] = {}
        self.runs_elastically = False
        self.stop_notice = StopNotice()
        self.steps_begun = 0
        self._environ = environ
        self._key = JobKey(environ)
        self._process_sets = RegisteredSets()
        self._members: tuple[int, ...] = ()  # of an elastic job's world, by rank; of world 1: the ranks
        self._tuned: dict[str, int] = {}  # knobs, in the last world of an elastic job in which any were
        self._full_tracebacks = False
        self._stack_dump: StackDumpTarget | None = None  # where this process writes its stacks
        self._leaving: Runtime | None = None  # the last runtime, which this process has left, but the others may not have
        self._joined_in = 0  # the process that has been in the job, or has tried to join it
        self._failure: HorovodInternalError | None = None  # of the last runtime, when this process left it

    @property
    def is_initialized(self) -> bool:
        """Whether this process belongs to a job."""
        return self.runtime is not None or self.waiting is not None

    @property
    def coordinates(self) -> World:
        """This process's rank, size and so on."""
        return self.current().world if self.waiting is None else self.waiting

    def current(self) -> Runtime:
        """Return the runtime.

        Raises:
            NotInitializedError: when there is none.
        """
        if self.runtime is not None:
            return self.runtime
        if self.waiting is None:
            if environment_name("full_tracebacks") not in self._environ:
                shorten_uncaught()
            raise NotInitializedError("hvdlite is not initialised; call hvd.init() first")
        raise NotInitializedError("the world of this elastic job has ended, and none has begun since: call a collective "
                                  "inside the function that hvd.elastic.run runs")

    # --- the beginning and the end of the job, for this process -------------------------------------------------------

    def join(self, comm: object, info: LaunchInfo | None = None) -> Config:
        """Join the job that `info` describes, or else the environment; return its configuration.

        A process that joins an elastic job later gets its world in `elastic.run`.

        Raises:
            LaunchError, ConfigError, UnsupportedError: see `api.init`.
        """
        self._joined_in = os.getpid()
        try:
            config = self._joined(comm, info)
        except LaunchError as error:
            if not self.is_child_of_rank:
                raise
            raise LaunchError(f"process {self._environ[launch_contract.JOINED]}, from which this one has its environment, "
                              "has joined the job as this rank already, and only one process of a rank can: call init() in "
                              f"that one only ({error})") from error
        if launch_contract.RANK in self._environ:
            self._environ.setdefault(launch_contract.JOINED, str(os.getpid()))
        return config

    def _joined(self, comm: object, given: LaunchInfo | None) -> Config:
        self._wait_until_left()
        config = self._config()
        self._full_tracebacks, self._failure = config.full_tracebacks, None
        if self.member is None:
            self.member = _member(self._environ, comm, config)
            if self.member is not None:  # each change collects garbage; what has been imported would make that slow
                gc.collect()
                gc.freeze()
        info = given or resolve_launch(comm, self._key.environment(), os.getppid(), config)
        self._key.take()
        configure_logging(config, lambda: self.coordinates.rank if self.is_initialized else info.world.rank)
        if launch_contract.JOINER in self._environ:
            self._enter(LaunchInfo("none", World()), config)
            self.waiting = info.world
            global_process_set.set_members(info.world.size, info.world.rank)
        else:
            self._enter(info, config)
        self.followers.world_began(self.current())
        return config

    def leave(self, *, waits: bool = True) -> None:
        """Leave the job; process sets are unregistered.

        Args:
            waits: False leaves it to the next call of this object to wait for the other ranks.
        """
        self._failure = self._failure if self.runtime is None else self.runtime.failure
        self._leaving, self.runtime, self.waiting = self.runtime or self._leaving, None, None
        if self._leaving is not None:
            self._leaving.leave()
            self._leaving.progress.withdraw()
        if waits:
            self._wait_until_left()
        if threading.current_thread() is threading.main_thread():
            self.stop_notice.release()
        self._process_sets.clear()
        if not self.is_child_of_rank:
            self._environ.pop(launch_contract.JOINED, None)

    def _wait_until_left(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.wait_until_left()

    def fail(self, error: BaseException, *, prints: bool = False) -> bool:
        """Tell the other ranks and the launcher that this process ends with an exception.

        Args:
            prints: whether to print it first, so that the cause is on the screen before the others are notified.

        Returns:
            False if this process has neither been in a job nor tried to join one: then nothing is done.
        """
        if self._in_child or self._joined_in != os.getpid():
            return False
        given = self._environ.get(launch_contract.RANK, "")
        rank = self.coordinates.rank if self.is_initialized else int(given) if given.isdecimal() else 0
        given = self._environ.get(launch_contract.MEMBER, "")
        own = int(given) if given.isdecimal() else rank
        directory = None if self.is_child_of_rank else self._environ.get(launch_contract.JOB_DIRECTORY)
        shown = prints and tracebacks.print_failure(error, directory, rank, full=self._full_tracebacks)
        if self.runtime is None:
            origin, text = origin_of(error, self._failure, rank), tracebacks.text_of(error)
        else:
            origin, text = tell_failure(self.runtime, error)
        if directory:
            member = dict(enumerate(self._members)).get(origin, own) if self._members else origin
            record_failure(directory, error, own, own if origin == rank else member, text, shown=shown)
        return True

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor."""
        if self.runtime is not None:
            self.runtime.close_in_child()
        if self.member is not None:
            self.member.close_in_child()

    def step_begins(self) -> None:
        """Note that parameters may change from now on: a member cannot run the present body again (#bodies)."""
        self.steps_begun += 1

    # --- process sets --------------------------------------------------------------------------------------------------

    def add_process_set(self, made: ProcessSet) -> None:
        """Register a process set on all ranks."""
        if self.waiting is not None:
            self._process_sets.add_later(made, self.waiting)
        else:
            self._process_sets.add(made, self.current(), in_call=self.runs_elastically)

    def remove_process_set(self, process_set: ProcessSet) -> None:
        """Remove a process set on all ranks."""
        self._process_sets.remove(process_set, None if self.waiting is not None else self.current())

    # --- elastic jobs: one world after the other -----------------------------------------------------------------------

    @contextlib.contextmanager
    def elastic_run(self) -> Iterator[MemberClient | None]:
        """Mark that `hvd.elastic.run` is running; provides the link with the launcher, or None when the job is not elastic.

        Raises:
            UnsupportedError: inside another one.
            NotInitializedError: before `init()`.
        """
        if self.runs_elastically:
            raise UnsupportedError("hvd.elastic.run was called inside a function that hvd.elastic.run runs; call one after "
                                   "the other")
        assert self.coordinates
        self.runs_elastically = True
        try:
            with self.stop_notice.telling(self._tell_notice) if self.member else contextlib.nullcontext():
                yield self.member
        finally:
            self.runs_elastically = False

    def _tell_notice(self) -> bool:
        """This process got SIGTERM: leave the job, or save the state if that ends as a whole; return whether to go on."""
        directory = self._environ.get(launch_contract.JOB_DIRECTORY, "")
        if self.member is None:
            return False
        if os.path.exists(os.path.join(directory, launch_contract.ENDING_FILE)):
            self.member.is_ending = self.member.saves_at_end
            return self.member.is_ending
        self.member.noticed()
        return True

    def end_world(self, reason: str, *, at_rest: bool) -> None:
        """Leave the world: its background thread ends, and its planes are closed. Followers let go of it.

        Args:
            reason: for the other ranks.
            at_rest: whether all ranks leave it here; then what is under way is finished first.
        """
        ended = self.runtime
        if ended is None:
            return
        if at_rest:
            ended.shutdown()
        ended.end(reason)
        ended.progress.withdraw()
        if self.member is not None:
            self.member.detach()
        self.followers.learned_in(ended)
        self._tuned = ended.tuned or self._tuned
        self.runtime, self.waiting = None, self.waiting or ended.world
        self._process_sets.world_ended()
        self.followers.world_ended()

    def begin_world(self, order: WorldOrder) -> None:
        """Enter a world: meet its other members, and let process sets and followers take part.

        Raises:
            LaunchError, OSError, ProtocolError: when the members cannot meet.
            HorovodInternalError: when the world ends before this returns.
        """
        assert self.member is not None
        self.end_world("it joins the job", at_rest=True)  # where it has been alone
        _take_coordinates(order, self.member.number, self._environ)
        config = self._config()
        self._enter(resolve_launch(None, self._key.environment(), os.getppid(), config), config,
                    Learned(self.followers.carried(), self._tuned))
        self._members = order.members
        self.member.met(order.epoch)
        self._process_sets.world_began(self.current(), order.members)
        self.followers.world_began(self.current())

    # --------------------------------------------------------------------------------------------------------------------

    @property
    def _in_child(self) -> bool:
        return any(part is not None and part.in_child for part in (self.runtime, self.member))

    @property
    def is_child_of_rank(self) -> bool:
        """Whether another process has joined the job as this rank; that one speaks for the rank."""
        return self._environ.get(launch_contract.JOINED, str(os.getpid())) != str(os.getpid())

    def _config(self) -> Config:
        return Config.from_environment({**self.defaults, **self._environ})

    def stack_dump(self, config: Config) -> StackDumpTarget:
        """Return where this process writes its stacks."""
        if self._stack_dump is None:
            self._stack_dump = enable_stack_dump(config.traceback_signal)
        return self._stack_dump

    def launch_environment(self) -> Mapping[str, str]:
        """Return the environment with the job's key, if this process has taken it out, and with defaults of knobs."""
        return {**self.defaults, **self._key.environment()}

    def _enter(self, info: LaunchInfo, config: Config, learned: Learned | None = None) -> None:
        self.runtime, self.waiting = self._started(info, config, self.stack_dump(config), learned), None
        global_process_set.set_members(self.runtime.world.size, self.runtime.world.rank)

    def _started(self, info: LaunchInfo, config: Config, stack_dump: StackDumpTarget, learned: Learned | None) -> Runtime:
        """Return a runtime that is running, with all that the environment asks for; nothing is left of one that fails."""
        cancellation, epoch = Cancellation(), info.world.epoch
        member = self.member if epoch else None  # 0: a single-rank world
        if member is not None:
            member.attach(epoch, cancellation.cancel)
        made = assemble(info, config, self.casts, stack_dump, self._environ, member, cancellation, learned)
        made.start()
        made.progress.watch(traffic=made.world.local_size < made.world.size)
        try:
            if member is not None:
                member.attach(epoch, made.stop, lambda: made.has_ended)
            if info.job_directory and not info.owns_directory:
                try:
                    made.progress.publish(info.job_directory, info.world.rank if member is None else member.number)
                except OSError as error:  # of the first world it is a job that cannot begin
                    if epoch <= 1:
                        raise
                    _log.warning("the progress of rank %d is not shown in world %d: %s", info.world.rank, epoch, error)
            if config.timeline and member is self.member:
                try:
                    made.start_timeline(_path_in(config.timeline, epoch), config.timeline_mark_cycles)
                except ConfigError as error:  # likewise; else each new rank 0 would end for it
                    if epoch <= 1:
                        raise
                    _log.warning("world %d has no timeline: %s", epoch, error)
        except BaseException as error:
            tell_failure(made, error)
            made.shutdown()
            made.progress.withdraw()
            raise
        return made


def _member(environ: Mapping[str, str], comm: object, config: Config) -> MemberClient | None:
    """Return this process's link with the launcher of its elastic job; None in other jobs.

    Raises:
        UnsupportedError: for what an elastic job cannot have.
        LaunchError: when the launcher does not answer.
    """
    if launch_contract.MEMBER not in environ:
        return None
    if comm is not None and comm != []:
        raise UnsupportedError("an elastic job has the members that its launcher chooses: call init() without comm")
    if config.cpu_operations == "mpi":
        raise UnsupportedError("HVDLITE_CPU_OPERATIONS=mpi is not for elastic jobs: an MPI job ends with its first rank")
    return MemberClient(environ[launch_contract.JOB_DIRECTORY], int(environ[launch_contract.MEMBER]))


def _take_coordinates(order: WorldOrder, member: int, environ: MutableMapping[str, str]) -> None:
    """Let the environment describe a member's place in a world, under hvdlite's and Horovod's names."""
    world = Hosts(order.ranks_by_machine).world(order.members.index(member), order.epoch)
    environ.update(launch_contract.rank_environment(world, None))
    environ[launch_contract.EPOCH] = str(order.epoch)
    environ.pop(launch_contract.JOINER, None)


def _path_in(path: str, epoch: int) -> str:
    """Return the path of a world's timeline: that of world 2 of trace.json is trace.2.json."""
    root, extension = os.path.splitext(path)
    return f"{root}.{epoch}{extension}" if epoch > 1 else path
