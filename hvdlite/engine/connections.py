"""The connections of a rank's background thread: control plane, planes, out-of-band channel, clock; and times, counts and
sizes that are not knobs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hvdlite.control.star import ControlPlane
from hvdlite.core.world import Hosts
from hvdlite.diagnostics.process_probe import ProcessProbe
from hvdlite.engine.mailboxes import Areas
from hvdlite.engine.oob import OobChannel
from hvdlite.memory.area import Area
from hvdlite.memory.shared import Heap
from hvdlite.planes.arithmetic import Casts
from hvdlite.planes.base import DevicePlane, OobTexts, Plane
from hvdlite.planes.staging import HostMemory

Clock = Callable[[], float]
"""Seconds on a monotonic clock, the same for all ranks of the job."""

FLUSH_SECONDS: Final = 2.0
"""How long the last messages may take when a rank ends."""
LOOK_SECONDS: Final = 0.25
"""How often a rank that waits looks whether it has waited long."""
LISTEN_SECONDS: Final = 0.2
"""How long a rank that never has to wait works on a plan before it looks for messages."""
TRACE_BATCH: Final = 256
"""How many events of a timeline are sent without waiting for another message."""
EAGER_TRAFFIC: Final = 1 << 20
"""Bytes that one eager tensor may bring to rank 0 over all ranks."""
EAGER_WAITED_FOR: Final = 256 << 10
"""Bytes that one eager tensor may bring to rank 0 from other hosts if callers block: a plane needs more messages."""


GroupPlanes = Callable[[int, Hosts, HostMemory, Area, OobTexts], Plane]
"""Returns the plane of one rank of a group: its index, the hosts of the group, memory for a segment, and what it waits with.

The group's ranks, as indices, are process set 0. The plane waits on this rank's word of the area.
"""


@dataclasses.dataclass(frozen=True)
class Connections:
    """How one rank reaches the others. Only the background thread calls them, except where their docstrings allow others.

    Attributes:
        control: carries reports and decisions.
        plane: moves tensors on the host.
        oob: carries the few bytes by which planes connect.
        devices: moves tensors on GPUs; None where there are none.
        probe: returns the state of the ranks of this host without asking them; by default of none.
        clock: the same for all ranks of the job.
        mailbox_area: makes the memory of mailboxes; None where there are none.
        casts: conversions of 16-bit floats, for mailboxes.
        heaps: from which the ranks of this host take memory for groups.
        group_planes: makes the planes of groups; None in a job of size 1.
        rank_names: of all ranks, in errors; empty: their numbers.
    """

    control: ControlPlane
    plane: Plane
    oob: OobChannel
    devices: DevicePlane | None = None
    probe: ProcessProbe = dataclasses.field(default_factory=lambda: ProcessProbe({}, {}))
    clock: Clock = time.monotonic
    mailbox_area: Areas | None = None
    casts: Casts = dataclasses.field(default_factory=Casts.of_numpy)
    heaps: Mapping[int, Heap] = dataclasses.field(default_factory=dict)
    group_planes: GroupPlanes | None = None
    rank_names: Sequence[str] = ()
