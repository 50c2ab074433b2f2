"""Durable checkpoints of a state, at boundaries: `state.checkpoint(directory)` (docs/elastic.md#checkpoints)."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from hvdlite import api
from hvdlite.core.errors import CheckpointError
from hvdlite.membership.events import TOO_FEW
from hvdlite.training.checkpoints.every import Every
from hvdlite.training.checkpoints.loading import load
from hvdlite.training.checkpoints.ranks import Ranks
from hvdlite.training.checkpoints.saving import finish, refuse_missing_package, save_objects

_log = logging.getLogger("hvdlite")


class DurableCheckpoints:
    """Writes a state now and then, and loads it when a job begins.

    Args:
        directory: as in `hvd.save`.
        every: the time between two checkpoints.
        state: an `ObjectState`.

    Raises:
        ValueError: for an interval that is none.
        ImportError: without the package safetensors.
        UnsupportedError: for another state.
    """

    def __init__(self, directory: str | os.PathLike[str], every: str | float, state: Any) -> None:
        refuse_missing_package()
        state._durable_parts()
        self._directory, self._every, self._state = os.path.abspath(directory), Every(every), state
        self._is_new = True  # nobody has looked for a checkpoint yet

    def resume(self) -> None:
        """At the beginning of a world: load the newest checkpoint, if rank 0 has not looked for it yet; all ranks call this.

        Raises:
            CheckpointError, ValueError: as `hvd.load`.
            HorovodInternalError: when a rank is lost.
        """
        is_new = Ranks.present("resume").broadcast(self._is_new, 0)
        if is_new:
            others = load(self._directory, **self._state._durable_parts())
            if others is not None:
                self._state._assign(others)  # what cannot be loaded in place
                if api.rank() == 0:
                    print(f"hvdlite: training goes on from a checkpoint in {self._directory}", file=sys.stderr, flush=True)
        self._is_new = False

    def boundary(self) -> None:
        """At a boundary: write a checkpoint, if one is due on all ranks; in the background, if the job does not end.

        Raises:
            HorovodInternalError: when a rank is lost.
            SystemExit: on all ranks, when the job ends, or its launcher is lost.
        """
        member = api.worlds().member
        if not api.is_initialized() or api.is_provisional():
            return
        is_ending = member is not None and member.is_ending
        if self._every.is_due(is_ending):
            is_ending = any(Ranks.present("end").gather(is_ending))
            self._write(blocking=is_ending)
            if is_ending:
                raise SystemExit(TOO_FEW)

    def world_ends(self) -> None:
        """All ranks stop at a boundary, and the world still works: write the last checkpoint, if the job ends with it.

        What is being written in the background has to be complete before members leave.
        """
        finish()
        member = api.worlds().member
        if member is not None and member.is_last:
            self._write(blocking=True)

    def write_alone(self) -> None:
        """Write what this process has; there is no world. An error is logged."""
        try:
            self._write(blocking=True)
        except CheckpointError as error:
            _log.error("%s", error)

    def _write(self, *, blocking: bool) -> None:
        save_objects(self._directory, self._state._durable_parts(), blocking=blocking)
