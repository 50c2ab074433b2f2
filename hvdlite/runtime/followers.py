"""Objects of the script, such as optimizers, that pass from one world to the next (docs/protocol.md#followers)."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Protocol

from hvdlite.handoff.job_state import JobState
from hvdlite.negotiation.messages import Layout
from hvdlite.runtime.names import Names
from hvdlite.runtime.runtime import Runtime


class Follower(Protocol):
    """An object of the script that lives longer than a world, such as an optimizer."""

    def world_ended(self) -> None:
        """Let go of the runtime, which has ended, and of all that belongs to it. May be called again."""

    def world_began(self, runtime: Runtime) -> None:
        """Take part in the world of a runtime, which has started. Not called for each world: its beginning may fail."""


class Learner:
    """A follower whose gradients go by a learned layout, which passes to the next world; for subclasses.

    Attributes:
        gradient_label: of its gradient set in the last world in which it took part; "" before.
        layout: the last one that it had.
    """

    gradient_label = ""
    layout: Layout | None = None

    def next_label(self, names: Names) -> str:
        """Return the label of its gradient set in the next world; "" when it has none there that all ranks take part in.

        Args:
            names: those of the next world.
        """
        raise NotImplementedError


class Followers:
    """The followers of this process, as long as they live, in order of construction. Only user threads call it."""

    def __init__(self) -> None:
        self._followers: weakref.WeakValueDictionary[int, Follower] = weakref.WeakValueDictionary()
        self._ids = itertools.count()
        self._are_collected = True
        self._are_inside = False  # some may take part in a world of whose end they have not been notified

    def add(self, follower: Follower) -> None:
        """Tell an object of the ends and beginnings of worlds from now on."""
        self._followers[next(self._ids)] = follower
        self._are_collected, self._are_inside = False, True

    def world_ended(self) -> None:
        """Let all go of a runtime that has ended."""
        self._are_collected, self._are_inside = not self._followers, False
        for follower in list(self._followers.values()):
            follower.world_ended()

    def learned_in(self, runtime: Runtime) -> None:
        """Keep the layouts of a runtime that has ended, for `carried`."""
        for follower in list(self._followers.values()):
            if isinstance(follower, Learner):
                follower.layout = runtime.learned_layout(follower.gradient_label) or follower.layout

    def carried(self) -> dict[str, Layout]:
        """Return the layouts of the followers that live, by their labels in the next world."""
        names, layouts = Names(JobState(1)), {}
        for follower in list(self._followers.values()):
            if isinstance(follower, Learner):
                label = follower.next_label(names)
                if label and follower.layout is not None:
                    layouts[label] = follower.layout
        return layouts

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
