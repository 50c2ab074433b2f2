"""Ranks as processes that exchange messages in a group."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence

import numpy as np

from hvdlite import api
from hvdlite.core import launch_contract
from hvdlite.core.array import Array
from hvdlite.core.types import Collective
from hvdlite.groups.group import Group
from hvdlite.groups.operation import Operation
from tests.groups.worlds import FileStore


def joined(directory: str, timeout: float = 60.0) -> Group:
    rank, size = (int(os.environ[name]) for name in (launch_contract.RANK, launch_contract.SIZE))
    return api.join_group(FileStore(directory), "group 0", rank, size, timeout)


def text(*numbers: int, size: int) -> Array:
    """Return `size` bytes that tell the numbers."""
    return np.random.default_rng(numbers).integers(0, 256, size, np.uint8)


def barrier(group: Group) -> None:
    call = group.start([Operation(collective=Collective.BARRIER, agreed="barrier()", dtype="uint8")], blocking=True)
    assert call.error is None, call.error


def all_to_all(directory: str, sizes: Sequence[int]) -> int:
    """Exchange batches of messages in random order, between barriers; return how many have come."""
    group, came = joined(directory), 0
    order, others = random.Random(group.rank), [other for other in range(group.size) if other != group.rank]
    for turn, size in enumerate(sizes):
        values = {other: np.empty(size, np.uint8) for other in others}
        begun = [(other, is_send) for other in others for is_send in (True, False)]
        order.shuffle(begun)
        calls = [group.send(text(group.rank, other, size=size), other, turn) if is_send else
                 group.receive(values[other], other, turn) for other, is_send in begun]
        anyone = np.empty(1, np.uint8)
        calls.append(group.send(np.array([group.rank], np.uint8), (group.rank + 1) % group.size, 1000))
        calls.append(group.receive(anyone, None, 1000))
        if turn % 2:
            barrier(group)  # nobody waits for the messages meanwhile
        order.shuffle(calls)
        for call in calls:
            assert call.wait(60.0) and call.error is None, call.error
        for other in others:
            assert (values[other] == text(other, group.rank, size=size)).all()
            came += 1
        assert anyone[0] == (group.rank - 1) % group.size
    barrier(group)
    group.close()
    return came


def death(directory: str) -> str | None:
    """Rank 1 dies while rank 0 receives from it, and rank 2 sends to it more than it takes; return the errors."""
    group = joined(directory)
    barrier(group)
    if group.rank == 1:
        print("ready", flush=True)
        signal.pause()
    call = group.receive(np.empty(4, np.uint8), 1, 0) if group.rank == 0 else group.send(np.empty(1 << 26, np.uint8), 1, 0)
    print("ready", flush=True)
    assert call.wait(60.0)
    assert group.send(np.empty(4, np.uint8), 2 - group.rank, 0).error is call.error
    return f"{type(call.error).__name__}: {call.error}"


def last_words(directory: str) -> str | None:
    """Rank 0 sends and ends; return what rank 1 receives then."""
    group = joined(directory)
    if group.rank == 0:
        for tag in range(3):
            group.send(text(tag, size=1000), 1, tag)
        group.close()
        return None
    call = group.receive(np.empty(1, np.uint8), 0, 7)
    assert call.wait(60.0)  # when rank 0 has left
    for tag in (2, 0, 1):
        values = np.empty(1000, np.uint8)
        assert group.receive(values, 0, tag).wait(60.0) and (values == text(tag, size=1000)).all()
    return f"{type(call.error).__name__}: {call.error}"


def waits_for_one_that_leaves(directory: str) -> str | None:
    """Rank 0 leaves while rank 1 waits for a message; return the error."""
    group = joined(directory)
    barrier(group)
    if group.rank == 0:
        group.close()
        return None
    call = group.receive(np.empty(1, np.uint8), 0, 7)
    assert call.wait(60.0)
    return f"{type(call.error).__name__}: {call.error}"
