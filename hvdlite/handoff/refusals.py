"""Calls in a world that has ended: a script that goes on making them has caught the error of the first ones."""

from __future__ import annotations

import logging
import sys
from typing import Final

from hvdlite.core.errors import HorovodInternalError, WorldEnded
from hvdlite.diagnostics.stall_report import location_of, script_frame

_log = logging.getLogger("hvdlite")

_WARNS_AT: Final = 3
_ENDS_AT: Final = 10


class Refusals:
    """The calls that have been refused in one world of an elastic job."""

    def __init__(self) -> None:
        self._count = 0
        self._first = ""  # where the first one was

    def error(self, failure: HorovodInternalError) -> HorovodInternalError | WorldEnded:
        """Return what a call is to raise; it counts if the script's code is on the stack, which catches that.

        Args:
            failure: what ended the world.
        """
        frame = script_frame(sys._getframe())
        if frame is None:  # a framework's thread: it may make many calls before it sees the first error
            return failure
        self._count += 1
        self._first = self._first or location_of(frame)
        if self._count == _WARNS_AT:
            _log.warning("the script goes on calling collectives in a world that has ended, the first in %s: it must not "
                         "catch HorovodInternalError there, for which hvd.elastic.run waits", self._first)
        if self._count < _ENDS_AT:
            return failure
        return WorldEnded(f"{failure}\nThe script has caught this error {self._count - 1} times, first in {self._first}")
