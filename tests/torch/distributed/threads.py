"""Process groups for tests: ranks as threads over real shared memory, without `torch.distributed`'s default group."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

from hvdlite_torch.distributed.process_group import HvdliteProcessGroup
from tests.groups.worlds import HANGS_SECONDS, groups, play

T = TypeVar("T")


def run(size: int, step: Callable[[Any], T], *, one_host: bool = True, timeout: float = HANGS_SECONDS,
        messages: bool = False) -> list[T]:
    """Run `step(process group)` on ranks as threads; return the results in rank order, or raise the first failure.

    Args:
        one_host: False lets the ranks agree as those of several hosts do.
        timeout: of operations.
        messages: whether ranks can send and receive.
    """
    return play(groups(size, one_host=one_host, timeout=timeout, messages=messages), lambda end: step(process_group(end)))


def process_group(end: Any) -> Any:
    """Return a process group over one end of a group."""
    def join(*_: object) -> HvdliteProcessGroup:
        raise AssertionError("no part of this group is made")

    return HvdliteProcessGroup(end, None, "tests", datetime.timedelta(seconds=end.timeout), join)
