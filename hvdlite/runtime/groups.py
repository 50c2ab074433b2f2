"""The ordered groups of a process: each one is a world of its own, or shares the runtime of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdlite.bootstrap.store import Store, end_meeting, meet_in_store
from hvdlite.core.config import Config
from hvdlite.core.errors import LaunchError
from hvdlite.memory.group_area import GroupArea, area_bytes
from hvdlite.ordered.group_end import GroupEnd
from hvdlite.ordered.transfers import Transfers
from hvdlite.planes.arithmetic import Casts
from hvdlite.planes.loopback import LoopbackHub, LoopbackPlane
from hvdlite.runtime.assemble import assemble
from hvdlite.runtime.runtime import Runtime


class Groups:
    """The groups of this process, and the runtimes that are only theirs. Only user threads call it.

    Args:
        environ: the process's environment.
        casts: conversions of 16-bit floats.
    """

    def __init__(self, environ: Mapping[str, str], casts: Casts) -> None:
        self._environ, self._casts = environ, casts
        self._ends: list[GroupEnd] = []
        self._leaving: list[Runtime] = []  # of groups that are closed

    def join(self, store: Store, name: str, rank: int, size: int, timeout: float,
             members: Sequence[int] | None = None) -> GroupEnd:
        """Meet the other ranks of a group; all of them call this.

        Args:
            store: of this group alone.
            name: for messages.
            timeout: seconds after which a call fails on a rank that still waits.
            members: the ranks of the world that are the group's, in its order; None if it is the whole world.

        Raises:
            LaunchError: when the ranks cannot meet.
            ValueError: for a rank that is not in the group.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in 0..{size - 1}")
        self._leaving = [runtime for runtime in self._leaving if not runtime.has_ended]
        shown = [str(rank) for rank in range(size)] if members is None else [str(member) for member in members]
        if size == 1:
            area = GroupArea(bytearray(area_bytes(1)), 0, 1, None)
            plane = LoopbackPlane(0, LoopbackHub(), lambda rank: None, self._casts)
            end = GroupEnd(name, 0, 1, timeout, plane, area, shares_board=True, members=shown)
        else:
            end = self._open(self._meet(store, rank, size), name, timeout, shown)
        self._ends.append(end)
        return end

    def close_all(self) -> None:
        """Leave all groups, and wait until the other ranks have left, too."""
        for end in self._ends:
            end.close()
        self._ends.clear()
        for runtime in self._leaving:
            runtime.wait_until_left()
        self._leaving.clear()

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor."""
        for end in self._ends:
            end.close_in_child()
        self._ends.clear()

    def _meet(self, store: Store, rank: int, size: int) -> Runtime:
        config = Config.from_environment(self._environ)
        info = meet_in_store(store, rank, size)
        try:
            runtime = assemble(info, config, self._casts, environment=self._environ)
        except OSError as error:
            raise LaunchError(f"the ranks of the group cannot meet: {error}") from error
        finally:
            if info.held_port is not None:
                info.held_port.close()
        runtime.start()
        end_meeting(store, rank)
        return runtime

    def _open(self, runtime: Runtime, name: str, timeout: float, members: Sequence[str]) -> GroupEnd:
        assert runtime.group_parts is not None
        try:
            parts = runtime.group_parts()
        except BaseException:
            self._leave(runtime)
            raise
        world = runtime.world
        messages = parts.memory.message_area(range(world.size)) if parts.is_one_host else None
        transfers = Transfers(messages, name, members) if messages is not None else None
        end = GroupEnd(name, world.rank, world.size, timeout, parts.plane, parts.area, shares_board=parts.is_one_host,
                       transfers=transfers, members=members, reporter=runtime.group_reports,
                       released=lambda: self._leave(runtime))
        runtime.when_over(end.fail)
        return end

    def _leave(self, runtime: Runtime) -> None:
        """Leave a group's own runtime, which ends when all ranks have left it."""
        runtime.leave()
        self._leaving.append(runtime)
