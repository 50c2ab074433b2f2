"""The construction of a rank's background thread from its parts."""

from __future__ import annotations

import functools

from hvdlite.core.config import Config
from hvdlite.core.world import World
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.stall_inspector import LOOKS, CoordinatorWatchdog, StallInspector, Times
from hvdlite.diagnostics.stall_report import StallReport
from hvdlite.diagnostics.timeline import Timeline
from hvdlite.engine.autotune import Autotuner
from hvdlite.engine.connections import Connections
from hvdlite.engine.coordinator_link import RemoteCoordinator
from hvdlite.engine.engine import Engine
from hvdlite.engine.limits import LOOK_SECONDS
from hvdlite.engine.rank_zero import RankZero
from hvdlite.handoff.handoff import Handoff
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.coordinator import Coordinator


def build_engine(world: World, config: Config, connections: Connections, coordinator: Coordinator | None, handoff: Handoff,
                 recorder: FlightRecorder) -> tuple[Engine, RankZero | None]:
    """Return a rank's background thread, not yet started, and rank 0's duties when this is rank 0.

    Args:
        coordinator: on rank 0 only.
    """
    control, clock, probe = connections.control, connections.clock, connections.probe
    times = Times(config.stall_check_time_seconds, config.stall_shutdown_time_seconds, config.silence_check_seconds,
                  config.heartbeat_timeout)
    controller = Controller(world.rank, epoch=world.epoch)
    rank_zero = None
    if coordinator is not None:
        deliver = functools.partial(StallReport.deliver, path=config.stall_report_file)
        rank_zero = RankZero(coordinator, control, recorder, clock,
                             StallInspector(coordinator, times, probe, deliver, recorder.story),
                             Timeline(world.size, lambda on: coordinator.order(timeline=on, now=clock()), clock),
                             Autotuner(config, coordinator, clock) if config.autotune else None)
    watchdog = CoordinatorWatchdog(world.rank, control.parent, config.silence_check_seconds, config.heartbeat_timeout, probe)
    link = rank_zero or RemoteCoordinator(control, controller)
    engine = Engine(connections, controller, link, handoff, recorder, watchdog,
                    serves=frozenset(range(world.size)) if rank_zero else control.children,
                    spin=config.spin_microseconds * 1e-6, look_seconds=min(LOOK_SECONDS, times.look / LOOKS))
    return engine, rank_zero
