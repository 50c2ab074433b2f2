"""Objects of the script, such as optimizers, that pass from one world to the next (docs/protocol.md#followers)."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Protocol

from hvdlite.runtime.runtime import Runtime


class Follower(Protocol):
    """An object of the script that lives longer than a world, such as an optimizer."""

    def world_ended(self) -> None:
        """Let go of the runtime, which has ended, and of all that belongs to it. May be called again."""

    def world_began(self, runtime: Runtime) -> None:
        """Take part in the world of a runtime, which has started. Not called for each world: its beginning may fail."""


class Followers:
    """The followers of this process, as long as they live, in order of construction. Only user threads call it."""

    def __init__(self) -> None:
        self._followers: weakref.WeakValueDictionary[int, Follower] = weakref.WeakValueDictionary()
        self._ids = itertools.count()
        self._are_collected = True
        self._are_inside = False  # some may take part in a world whose end they have not been told

    def add(self, follower: Follower) -> None:
        """Tell an object of the ends and beginnings of worlds from now on."""
        self._followers[next(self._ids)] = follower
        self._are_collected, self._are_inside = False, True

    def world_ended(self) -> None:
        """Let all go of a runtime that has ended."""
        self._are_collected, self._are_inside = not self._followers, False
        for follower in list(self._followers.values()):
            follower.world_ended()

    def collect(self) -> None:
        """Free what is left of the runtime, whose parts refer to each other, and followers that the script has dropped.

        All ranks must agree on which followers live, because their collectives are numbered in their order.
        """
        if not self._are_collected:
            gc.collect()
            self._are_collected = True

    def world_began(self, runtime: Runtime) -> None:
        """Let all that live take part in the world of a runtime; nothing is left of another one."""
        if self._are_inside:  # `shutdown` has ended their world, after which gradients can still be looked at
            self.world_ended()
        self.collect()
        for follower in list(self._followers.values()):
            self._are_inside = True
            follower.world_began(runtime)
