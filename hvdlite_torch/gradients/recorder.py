"""A hook that records parameters without calling Python.

A hook in Python costs microseconds, which for a small gradient is more than copying and reducing it. So while a backward
pass goes on whose end is awaited, the hook of small parameters is the `append` of a list. The parameter that is expected to
be a bucket's last one has a hook in Python instead, at which the others are handed over together. Where the order differs
from what was expected, that happens later, at the end of the backward pass at the latest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class Recorder:
    """Records the parameters whose gradients have been accumulated.

    Args:
        called: the hook of parameters while nothing is recorded, and of those that are not recorded.

    Attributes:
        parameters: in the order in which their gradients were accumulated.
        hook: of recorded parameters. `__setstate__` changes what this function calls, for all of them at once.
        is_recording: whether `hook` appends parameters to the list.
        small: the parameters, by identity, that are recorded.
        ending: those of them after which a bucket is expected to be full.
    """

    def __init__(self, called: Callable[[torch.Tensor], None]) -> None:
        self.parameters: list[torch.Tensor] = []
        self.hook: functools.partial[None] = functools.partial(called)
        self.is_recording = False
        self.small: frozenset[int] = frozenset()
        self.ending: frozenset[int] = frozenset()
        self._called = called

    def start(self) -> None:
        """Record from now on."""
        self.is_recording = True
        self._call(self.parameters.append)

    def stop(self) -> None:
        """Forget what was recorded, and call Python from now on."""
        if self.is_recording:
            self.is_recording = False
            self._call(self._called)
        self.parameters.clear()

    def take(self) -> list[torch.Tensor]:
        """Return what was recorded; go on recording."""
        taken = self.parameters.copy()
        self.parameters.clear()
        return taken

    def record_only(self, small: frozenset[int], ending: Iterable[int], handles: Mapping[int, RemovableHandle]) -> None:
        """Record these parameters from now on, given by identity, and call Python for those that are `ending`.

        Args:
            handles: of the hooks of all parameters.
        """
        self.small, self.ending = small, frozenset(ending)
        recorded = small - self.ending
        for key, handle in handles.items():
            hooks = handle.hooks_dict_ref()
            if hooks and handle.id in hooks:
                hooks[handle.id] = self.hook if key in recorded else self._called

    def _call(self, function: Callable[[torch.Tensor], Any]) -> None:
        self.hook.__setstate__((function, (), {}, vars(self.hook)))  # type: ignore[attr-defined]
