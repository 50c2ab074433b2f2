"""The ordered groups of a process: a group is a world of its own, or lives on the runtime of the process's job.

It lives on the job's runtime when all its ranks are in the job, and are all of it, in its order of ranks. The first group of
a process that has not called `init()` begins the job, unless the launcher says that the job is another one. So a script that
only uses groups has reports, a timeline and failure records like any other; `init()` later shares the runtime.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from hvdlite.bootstrap.environments import LaunchInfo, how_to_have_a_key, job_key, read_launch_info
from hvdlite.bootstrap.store import KeyValues, meet_in_store, own_address
from hvdlite.core import launch_contract
from hvdlite.core.config import Config, timeout_or_inf
from hvdlite.core.errors import ConfigError, ForkedProcessError, LaunchError
from hvdlite.memory.group_area import GroupArea, area_bytes
from hvdlite.ordered.group_end import GroupEnd
from hvdlite.ordered.negotiated_transfers import NegotiatedTransfers
from hvdlite.ordered.ring_transfers import RingTransfers
from hvdlite.planes.loopback import LoopbackHub, LoopbackPlane
from hvdlite.runtime.assemble import assemble
from hvdlite.runtime.group_link import GroupAnnouncements, GroupLink
from hvdlite.runtime.group_reports import ReportedGroup
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


class Job(Protocol):
    """The use of the job's runtime by groups: like `init` and `shutdown`, but that the end is not waited for."""

    def begin(self, info: LaunchInfo | None) -> None:
        """Use it; if need be, join the job that `info` describes, or else the environment."""

    def end(self) -> None:
        """Use it no more."""


class Groups:
    """The groups of this process, and the runtimes that are only theirs. Only user threads call it.

    Args:
        worlds: the job's runtime, and the environment.
        job: its use.
    """

    def __init__(self, worlds: Worlds, job: Job) -> None:
        self._worlds, self._job = worlds, job
        self._ends: list[GroupEnd] = []
        self._own: list[Runtime] = []  # of groups that are not closed
        self._leaving: list[Runtime] = []  # of groups that are
        self._of_world: Runtime | None = None  # the job's, if the whole world that has groups is its ranks
        self._parent = 0  # the process with groups or a runtime that this one was forked from

    def join(self, store: KeyValues, name: str, rank: int, size: int, timeout: float,
             members: Sequence[int] | None = None) -> GroupEnd:
        """Meet the other ranks of a group; see `api.join_group`."""
        if self._parent:
            raise ForkedProcessError(f"{name}: this process (pid {os.getpid()}) was forked from a rank (pid "
                                     f"{self._parent}), to which the job and its groups belong; start workers with the "
                                     "spawn method")
        if not 0 <= rank < size:
            raise ValueError(f"{name}: rank {rank} is not in 0..{size - 1}")
        self._leaving = [runtime for runtime in self._leaving if not runtime.has_ended]
        shown = [str(rank) for rank in range(size)] if members is None else [str(member) for member in members]
        if size == 1:
            area = GroupArea(bytearray(area_bytes(1)), 0, 1, None)
            plane = LoopbackPlane(0, LoopbackHub(), lambda rank: None, self._worlds.casts)
            return GroupEnd(name, 0, 1, timeout, plane, area, members=shown)
        runtime, identity, release = self._meet(store, name, rank, size, members)
        try:
            end = self._opened(runtime, identity, name, timeout, members, shown, release)
        except BaseException:
            release()
            raise
        return end

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of the groups that are worlds of their own that this process ends with an exception."""
        for runtime in self._own:
            tell_failure(runtime, error)

    def close_all(self) -> None:
        """Leave all groups, and wait until the other ranks have left those that are worlds of their own, too."""
        until = time.monotonic() + DRAIN_SECONDS
        for end in list(self._ends):
            end.drain(until - time.monotonic())
            end.close()
        for runtime in self._leaving:
            runtime.wait_until_left()
        self._leaving.clear()

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor."""
        if self._ends or self._own or self._worlds.runtime is not None:
            self._parent = os.getppid()
        for end in self._ends:
            end.close_in_child()
        for runtime in (*self._own, *self._leaving):
            runtime.close_in_child()

    def _meet(self, store: KeyValues, name: str, rank: int, size: int, members: Sequence[int] | None,
              ) -> tuple[Runtime, str, Callable[[], None]]:
        """Meet the other ranks; return the runtime on which the group lives, an id of the group, and what ends its use."""
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
                self._job.begin(info if shared == MET else None)
                runtime, release = self._worlds.current(), self._job.end
                self._of_world = runtime if members is None else self._of_world
            else:
                runtime = self._started(dataclasses.replace(info, rank_names=tuple(map(str, members or ()))), config)
                self._of_world = None if members is None else self._of_world
                release = self._leave_own(runtime)
        finally:
            if info.held_port is not None:
                info.held_port.close()
        return runtime, info.identity, release

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

    def _reports_to(self, runtime: Runtime, members: Sequence[int] | None) -> Runtime:
        """Return the runtime to which a group reports: the job's, if the group's ranks are known to be ranks of the job."""
        job = self._worlds.runtime
        return runtime if members is None or job is None or job is not self._of_world else job

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

    def _leave_own(self, runtime: Runtime) -> Callable[[], None]:
        """Return what leaves a group's own runtime, which ends when all ranks have left it."""
        def leave() -> None:
            runtime.leave()
            if runtime in self._own:
                self._own.remove(runtime)
                self._leaving.append(runtime)
        return leave

    def _opened(self, runtime: Runtime, identity: str, name: str, timeout: float, members: Sequence[int] | None,
                shown: Sequence[str], release: Callable[[], None]) -> GroupEnd:
        assert runtime.group_parts is not None
        parts, world = runtime.group_parts(), runtime.world
        rings = parts.memory.message_area(range(world.size)) if parts.is_one_host else None
        transfers = RingTransfers(rings, name, shown) if rings is not None else NegotiatedTransfers(
            GroupLink(runtime, parts.oob.part("messages")), name, world.rank, world.size, shown)
        announcements = None if parts.is_one_host else GroupAnnouncements(parts.oob.part("standings"))

        told = self._reports_to(runtime, members)
        if told is runtime and runtime in self._own:
            _start_timeline(runtime, name)

        def closed() -> None:
            for where, group in reported:
                where.remove_group(group)
            self._ends.remove(end)
            release()

        end = GroupEnd(name, world.rank, world.size, timeout, parts.plane, parts.area, announcements=announcements,
                       transfers=transfers, members=shown, reporter=told.group_reports(runtime), released=closed)
        self._ends.append(end)
        reported = [(runtime, ReportedGroup(end, identity, range(world.size)))]
        if told is not runtime and members is not None:
            reported.append((told, ReportedGroup(end, identity, members, lambda: told.failure)))
        for where, group in reported:
            where.add_group(group)
        return end


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
