"""`horovod.common.elastic` and `horovod.runner.elastic.worker`: states, and what scripts import beside them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from hvdlite.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.training.elastic import run
from hvdlite.training.elastic.state import ObjectState, State

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State", "run", "run_fn"]


class HostUpdateResult(enum.IntFlag):
    """How the hosts have changed; the second argument of `State.on_hosts_updated`."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


def run_fn(func: Callable[..., Any], reset: Callable[[], object]) -> Callable[..., Any]:
    """Return `hvd.elastic.run(func)`; the runtime needs no function that resets it."""
    return run(func)
