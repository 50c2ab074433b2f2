"""`horovod.common.elastic`, `horovod.common.exceptions` and `horovod.runner.elastic.worker`: what scripts import of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from hvdlite import api
from hvdlite.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdlite.training.elastic import run
from hvdlite.training.elastic.state import ObjectState, State

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState",
           "State", "get_version_mismatch_message", "run", "run_fn"]


class HostUpdateResult(enum.IntFlag):
    """How the hosts have changed; the second argument of `State.on_hosts_updated`."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class HostMessages:
    """What scripts use of a private queue in Horovod's states, `state._host_messages`: to wait for a change of ranks."""

    def empty(self) -> bool:
        """Return whether the ranks stay as they are; else one of the next commits ends their world."""
        member = api.worlds().member
        return member is None or not member.is_to_stop


def run_fn(func: Callable[..., Any], reset: Callable[[], object]) -> Callable[..., Any]:
    """Return `hvd.elastic.run(func)`; the runtime needs no function that resets it."""
    return run(func)


def install() -> None:
    """Give all states what scripts for Horovod may ask them for."""
    State._host_messages = HostMessages()  # type: ignore[attr-defined]


class HorovodVersionMismatchError(ImportError):
    """Never raised: hvdlite is not built against a framework. Here for scripts that catch it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return Horovod's words for a framework that is not the one it was built with."""
    return f"built with {name} {version}, but {installed_version} is installed"
