"""The groups of a process. Each lives on a runtime: that of the process's job, or one of a world of its own.

A group lives on the job's runtime when its ranks are known to be ranks of the job: those of the default group are if they
are all of the job, in its order of ranks, and so are those of its parts. The first group of a process that has not called
`init()` begins the job, unless the launcher has started another job. So a script that only uses groups has reports,
a timeline and failure records like any other; `init()` later shares the runtime.

The ranks of a world of its own meet in a store; all groups then meet on their runtime (`meeting.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from hvdlite.bootstrap.environments import LaunchInfo, how_to_have_a_key, job_key, read_launch_info
from hvdlite.bootstrap.store import KeyValues, meet_in_store, own_address
from hvdlite.core import launch_contract
from hvdlite.core.config import Config, timeout_or_inf
from hvdlite.core.errors import ConfigError, ForkedProcessError, LaunchError
from hvdlite.core.world import Hosts
from hvdlite.engine.decisions import failure_error
from hvdlite.groups.carriers import Carrier, RemoteCarrier, RingCarrier
from hvdlite.groups.execution import GroupExecutor
from hvdlite.groups.group import Group
from hvdlite.groups.link import GroupLink
from hvdlite.groups.meeting import GroupMeeting, GroupMemory
from hvdlite.groups.members import GroupMembers
from hvdlite.groups.messages import Messages
from hvdlite.groups.reports import Reports, RuntimeReports, notice_of
from hvdlite.handoff.group_state import GroupState
from hvdlite.memory.area import DONE, Area, area_bytes
from hvdlite.memory.patience import Patience
from hvdlite.memory.rings import Rings
from hvdlite.negotiation.messages import FailureNotice
from hvdlite.planes.loopback import LoopbackHub, LoopbackPlane
from hvdlite.runtime.assemble import assemble
from hvdlite.runtime.process_hooks import configure_logging, tell_failure
from hvdlite.runtime.runtime import Runtime
from hvdlite.runtime.worlds import Worlds

_log = logging.getLogger("hvdlite")

DRAIN_SECONDS: Final = 5.0
"""How long the end of a process waits for what its groups have begun."""

RUNTIME: Final = "the runtime"
"""What the ranks of a group can share: the job's runtime exists."""
LAUNCHED: Final = "the launcher's job"
"""It can begin as the launcher has prepared it."""
MET: Final = "the job of this group"
"""It can begin with these ranks."""


class Groups:
    """The groups of this process, and the runtimes that are only theirs. Only user threads call it.

    Args:
        worlds: the job's runtime, and the environment.
        begin: counts a user of the job's runtime; if need be, joins the job that is described, or else the environment's.
        end: one user less; the end of the job is not waited for.
    """

    def __init__(self, worlds: Worlds, begin: Callable[[LaunchInfo | None], None], end: Callable[[], None]) -> None:
        self._worlds = worlds
        self._begin = begin
        self._end = end
        self._groups: list[Group] = []
        self._of_world: list[Group] = []  # those of `open`, which end with the world
        self._own: list[Runtime] = []  # of groups that are not closed
        self._leaving: list[Runtime] = []  # of groups that are
        self._default: Runtime | None = None  # the job's, if the default group's ranks are those of the job
        self._parent = 0  # the process with groups or a runtime that this one was forked from

    def open(self, name: str, ranks: Sequence[int], timeout: float) -> Group:
        """Make a group of ranks of this process's world; see `api.open_group`."""
        self._check_process(name)
        runtime = self._worlds.current()
        rank = runtime.world.rank
        if rank not in ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(runtime.world.size)):
            raise ValueError(f"{name}: rank {rank} cannot make a group of ranks {list(ranks)}: it has to be one of them, "
                             f"each must be there once, and the world has ranks 0 to {runtime.world.size - 1}")
        for group in [each for each in self._groups if not each.state.has_runtime]:
            group.close()  # of an earlier world
        members = GroupMembers.of(name, ranks, rank, runtime.hosts)
        if members.size == 1:
            return self._alone(members, timeout)
        group = self._opened(runtime, members, timeout, time.monotonic() + timeout, lambda: None)
        self._of_world.append(group)
        return group

    def join(self, store: KeyValues, name: str, rank: int, size: int, timeout: float,
             members: Sequence[int] | None = None) -> Group:
        """Meet the other ranks of a group; see `api.join_group`."""
        self._check_process(name)
        if not 0 <= rank < size:
            raise ValueError(f"{name}: rank {rank} is not in 0..{size - 1}")
        self._leaving = [runtime for runtime in self._leaving if not runtime.has_ended]
        names = tuple(map(str, range(size) if members is None else members))
        if size == 1:
            return self._alone(GroupMembers(name, 0, (0,), Hosts(((0,),)), names), timeout)
        deadline = time.monotonic() + min(timeout, store.seconds)
        if members is not None and self._default is not None and self._default is self._worlds.runtime:
            runtime, ranks = self._default, tuple(members)
            self._begin(None)
            release = self._end
        else:
            runtime, release = self._meet(store, name, rank, size, members)
            ranks = tuple(range(size))
        try:
            own = GroupMembers.of(name, ranks, runtime.world.rank, runtime.hosts, names)
            return self._opened(runtime, own, timeout, deadline, release)
        except BaseException:
            release()
            raise

    def _check_process(self, name: str) -> None:
        if self._parent:
            raise ForkedProcessError(f"{name}: this process (pid {os.getpid()}) was forked from a rank (pid "
                                     f"{self._parent}), to which the job and its groups belong; start workers with the "
                                     "spawn method")

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of the groups that are worlds of their own that this process ends with an exception."""
        for runtime in self._own:
            tell_failure(runtime, error)

    def leave_world(self) -> None:
        """Leave the groups of `open`: this process leaves the world, and the others do not."""
        for group in list(self._of_world):
            group.close()

    def close_all(self) -> None:
        """Leave all groups, and wait until the other ranks have left those that are worlds of their own, too."""
        until = time.monotonic() + DRAIN_SECONDS
        for group in list(self._groups):
            group.drain(until - time.monotonic())
            group.close()
        for runtime in self._leaving:
            runtime.wait_until_left()
        self._leaving.clear()

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor."""
        if self._groups or self._own or self._worlds.runtime is not None:
            self._parent = os.getppid()
        for group in self._groups:
            group.close_in_child()
        for runtime in (*self._own, *self._leaving):
            runtime.close_in_child()

    # --- where a group lives ----------------------------------------------------------------------------------------------

    def _meet(self, store: KeyValues, name: str, rank: int, size: int, members: Sequence[int] | None,
              ) -> tuple[Runtime, Callable[[], None]]:
        """Meet the other ranks; return the runtime on which the group lives, and what ends its use."""
        environment = self._worlds.launch_environment()
        config = Config.from_environment(environment)
        configure_logging(config, lambda: rank)
        info, shared = meet_in_store(
            store, rank, size, job_key(environment), place=environment.get(launch_contract.JOB_DIRECTORY, ""),
            address=own_address(environment, store), can_share=self._can_share(rank, size, is_world=members is None),
            name=name, members=members or (), patience=timeout_or_inf(config.stall_check_time_seconds),
            allows_insecure_store=config.allow_insecure_store, how_to_have_a_key=how_to_have_a_key(environment))
        try:
            if shared:
                self._begin(info if shared == MET else None)
                runtime, release = self._worlds.current(), self._end
                self._default = runtime if members is None else self._default
            else:
                runtime = self._started(dataclasses.replace(info, rank_names=tuple(map(str, members or ()))), config)
                self._default = None if members is None else self._default
                release = functools.partial(self._leave_own, runtime)
        finally:
            if info.held_port is not None:
                info.held_port.close()
        return runtime, release

    def _can_share(self, rank: int, size: int, *, is_world: bool) -> str:
        """Return what this rank can have in common with the others."""
        worlds = self._worlds
        if worlds.is_initialized:
            runtime = worlds.runtime
            fits = (worlds.waiting is None and worlds.member is None and runtime is not None and runtime.failure is None
                    and (runtime.world.rank, runtime.world.size) == (rank, size))
            return RUNTIME if fits else ""
        environment = worlds.launch_environment()
        if not is_world or launch_contract.MEMBER in environment or worlds.is_child_of_rank:
            return ""
        try:
            launched = read_launch_info(environment, os.getppid())
        except LaunchError:  # its variables are for something else
            return ""
        if launched.environment == "none":
            return MET
        if (launched.world.rank, launched.world.size) != (rank, size):
            return ""
        return LAUNCHED if launched.is_complete and not launched.owns_directory else MET

    def _started(self, info: LaunchInfo, config: Config) -> Runtime:
        """Return the runtime of a world of its own. On one host it has no port, whatever the knob says."""
        worlds = self._worlds
        if not info.on_several_hosts:
            config = dataclasses.replace(config, control="auto")
        try:
            runtime = assemble(info, config, worlds.casts, worlds.stack_dump(config), worlds.launch_environment())
        except OSError as error:
            raise LaunchError(f"the ranks of the group cannot meet: {error}") from error
        runtime.start()
        self._own.append(runtime)
        return runtime

    def _leave_own(self, runtime: Runtime) -> None:
        """Leave a group's own runtime, which ends when all ranks have left it."""
        runtime.leave()
        if runtime in self._own:
            self._own.remove(runtime)
            self._leaving.append(runtime)

    # --- what a group has -------------------------------------------------------------------------------------------------

    def _alone(self, members: GroupMembers, timeout: float) -> Group:
        """Return a group of this rank only."""
        state = GroupState(members.name, (0,), Area(bytearray(area_bytes(1)), 0, 1))
        plane, reports = LoopbackPlane(0, LoopbackHub(), lambda rank: None, self._worlds.casts), Reports()
        return Group(members, timeout, state, GroupExecutor(members, plane, state, reports, None), None, reports)

    def _opened(self, runtime: Runtime, members: GroupMembers, timeout: float, deadline: float,
                release: Callable[[], object]) -> Group:
        """Like `_made`; of a job that fails, the reason is raised, and not that its memory has ended with it."""
        try:
            return self._made(runtime, members, timeout, deadline, release)
        except MemoryError as error:
            if runtime.failure is None:
                raise
            raise runtime.failure.with_traceback(None) from error

    def _made(self, runtime: Runtime, members: GroupMembers, timeout: float, deadline: float,
              release: Callable[[], object]) -> Group:
        """Meet on a runtime, and return the group.

        Args:
            deadline: of the meeting, in `time.monotonic()`.
            release: called when the group is closed.
        """
        config, memory = runtime.config, GroupMemory(len(members.local), runtime.config.shm_slot)
        patience = timeout_or_inf(config.stall_check_time_seconds)
        place = GroupMeeting(runtime, members, memory.nbytes, patience).meet(deadline)
        link = GroupLink(runtime, f"{place.identity}.", members.of_runtime)
        failures, progress = link.part("failures"), link.part("progress")

        def report_error(error: BaseException) -> None:
            failures.announce(members.others, msgspec.msgpack.encode(notice_of(error, runtime.world.rank)))

        def failed(source: int, text: bytes) -> None:
            notice = msgspec.msgpack.decode(text, type=FailureNotice)
            state.fail(failure_error(notice, runtime.world.rank, runtime.connections.rank_names))

        def closed() -> None:
            runtime.remove_group(state)
            self._groups.remove(group)
            if group in self._of_world:
                self._of_world.remove(group)
            failures.close()
            progress.close()
            heaps[area.index].take_back()
            release()

        heaps = [runtime.connections.heaps[members.of_runtime[rank]] for rank in members.local]
        reports = RuntimeReports(runtime, members.of_runtime)
        made: list[Area] = []
        try:
            area = memory.area(place.memory, members.local.index(members.rank))
            made.append(area)
            if area.index == 0:
                heaps[0].lend([place.memory], area.all_let_go(DONE))
            state = GroupState(place.identity, members.of_runtime, area, reports.waits_changed)
            make_plane = runtime.connections.group_planes
            assert make_plane is not None, "a job of one rank has groups of one rank only"
            plane = make_plane(members.rank, members.hosts, memory, area, link)
        except BaseException as error:
            report_error(error)
            for each in made:
                each.release()
            raise
        rings = Rings(memory.pairs, area.index, heaps)
        messages = Messages(members, state, _carriers(members, area, rings, link.part("messages")), reports.progress)
        everybody = len(runtime.hosts.local_ranks(runtime.world.rank))
        execution = GroupExecutor(members, plane, state, reports, messages, link=None if plane.name == "shm" else progress,
                                  polling=Patience.of_ranks(config.spin_microseconds * 1e-6, everybody))
        group = Group(members, timeout, state, execution, messages, reports, report_error=report_error, released=closed)
        self._groups.append(group)
        runtime.add_group(state)
        failures.listen(failed)
        if runtime in self._own:
            _start_timeline(runtime, members.name)
        return group


def _carriers(members: GroupMembers, area: Area, rings: Rings, link: GroupLink) -> dict[int, Carrier]:
    """Return what carries messages between this rank and each other one."""
    near = {rank: index for index, rank in enumerate(members.local) if rank != members.rank}
    far = [rank for rank in members.others if rank not in near]
    found: dict[int, Carrier] = dict.fromkeys(near, RingCarrier(rings, area, near))
    return {**found, **dict.fromkeys(far, RemoteCarrier(link, far))} if far else found


def _start_timeline(runtime: Runtime, group: str) -> None:
    """Write a timeline of a group that is a world of its own, if there is to be one, beside that of the job."""
    config = runtime.config
    if not config.timeline:
        return
    root, extension = os.path.splitext(config.timeline)
    path = f"{root}.{re.sub(r'[^A-Za-z0-9_.]+', '-', group)}{extension}"
    try:
        runtime.start_timeline(path, config.timeline_mark_cycles)
    except ConfigError as error:
        _log.warning("%s has no timeline: %s", group, error)
