"""The connections of a rank's background thread: control plane, planes, out-of-band channel, clock."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from hvdlite.control.base import ControlPlane
from hvdlite.diagnostics.process_probe import ProcessProbe
from hvdlite.engine.limits import Clock
from hvdlite.engine.mailboxes import Areas
from hvdlite.engine.oob import GroupOob, OobChannel
from hvdlite.memory.group_area import GroupArea
from hvdlite.memory.shared import SharedMemory
from hvdlite.planes.base import DevicePlane, Plane


@dataclasses.dataclass(frozen=True)
class GroupPlane:
    """What one ordered group of all ranks has of its own.

    Attributes:
        plane: has all ranks as process set 0; its waits sleep on the area's word.
        area: of this host.
        is_one_host: whether the ranks share the area and move tensors through shared memory alone.
        memory: the host's, the group's part of it; for what else the group shares.
        oob: the group's out-of-band texts.
    """

    plane: Plane
    area: GroupArea
    is_one_host: bool
    memory: SharedMemory
    oob: GroupOob


GroupParts = Callable[[], GroupPlane]
"""Makes them; all ranks make the same calls in the same order. Any thread may call it."""


@dataclasses.dataclass(frozen=True)
class Connections:
    """How one rank reaches the others. Only the background thread calls them, but for what they say themselves.

    Attributes:
        control: carries reports and decisions.
        plane: moves tensors on the host.
        oob: carries the few bytes by which planes connect.
        devices: moves tensors on GPUs; None where there are none.
        probe: tells the state of the ranks of this host without asking them; by default it knows none.
        clock: the same for all ranks of the job.
        mailbox_area: makes the memory of mailboxes; None where there are none.
        group_parts: makes what an ordered group has of its own; None in a job of size 1.
        rank_names: of all ranks, in errors; empty: their numbers.
    """

    control: ControlPlane
    plane: Plane
    oob: OobChannel
    devices: DevicePlane | None = None
    probe: ProcessProbe = dataclasses.field(default_factory=lambda: ProcessProbe({}, {}))
    clock: Clock = time.monotonic
    mailbox_area: Areas | None = None
    group_parts: GroupParts | None = None
    rank_names: Sequence[str] = ()
