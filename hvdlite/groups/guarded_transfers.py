"""The calls of one rank's sends and receives, and the lock that guards them; the base of what implements `Transfers`."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from hvdlite.core.array import Array
from hvdlite.core.errors import ForkedProcessError, HorovodInternalError
from hvdlite.groups.matching import ANY
from hvdlite.groups.transfers import Owner, Receive, Send, Texts, Transfer

T = TypeVar("T")

_log = logging.getLogger("hvdlite")


class GuardedTransfers(Owner):
    """Calls under way. They are ended without the lock, because their callbacks may make other calls.

    Args:
        group: its name, for messages.
        rank: this one.
        size: number of ranks.
        members: the name of each rank, for messages.
    """

    def __init__(self, group: str, rank: int, size: int, members: Sequence[str]) -> None:
        self._rank, self._process = rank, os.getpid()
        self._texts = Texts(group, rank, size, members)
        self._others = [other for other in range(size) if other != rank]
        self._lock = threading.Lock()  # guards the rest
        self._error: Exception | None = None
        self._calls: dict[Transfer, None] = {}  # under way, oldest first
        self._over: deque[tuple[Transfer, Exception | None]] = deque()  # to be ended without the lock

    def send(self, values: Array, to: int, tag: int, timeout: float = math.inf) -> Transfer:
        """See `Transfers.send`."""
        self._texts.check_peer("send to", to)
        call = Send(self, values, to, tag, timeout)
        self._start(call, lambda: self._begin_send(call))
        return call

    def receive(self, values: Array, source: int | None, tag: int, timeout: float = math.inf) -> Transfer:
        """See `Transfers.receive`."""
        if source is not None:
            self._texts.check_peer("receive from", source)
        call = Receive(self, values, ANY if source is None else source, tag, timeout)
        self._start(call, lambda: self._begin_receive(call))
        return call

    def pending(self) -> list[str]:
        """Return descriptions of the calls under way, the oldest first."""
        with self._lock:
            return [self._texts.shown(call) for call in self._calls]

    def described(self, call: Transfer) -> tuple[str, int, Sequence[int]]:
        """See `Owner`."""
        peers = self._others if call.peer == ANY else [call.peer]
        return self._texts.message(call, peers), self._rank, peers

    def flush(self, until: float) -> None:
        """See `Transfers.flush`."""
        with self._lock:
            sends = [call for call in self._calls if isinstance(call, Send)]
        for call in sends:
            call.wait(max(0.0, until - time.monotonic()))

    def fail(self, error: Exception) -> None:
        """See `Transfers.fail`."""
        with self._lock:
            self._fail(error)
        self._end_finished()

    def _start(self, call: Transfer, begin: Callable[[], None]) -> None:
        """Add a call, begin it with the lock, and go on with it; it fails at once if no call can be made any more."""
        def start() -> None:
            self._calls[call] = None
            if self._error is not None:
                self._finish(call, self._error)
                return
            begin()

        if os.getpid() == self._process:
            self._guarded(start)
            self._go_on(call)
        else:  # the lock may be held for ever
            call.end(ForkedProcessError(
                f"{self._texts.group}: this process (pid {os.getpid()}) was forked from rank {self._rank} (pid "
                f"{self._process}), to which the group belongs; start workers with the spawn method"))

    def _guarded(self, act: Callable[[], T]) -> T | None:
        """Call a function with the lock, and end the calls that it has finished."""
        try:
            with self._lock:
                return act()
        except Exception as error:
            self.fail(error)
        except BaseException:  # between any two lines
            self.fail(HorovodInternalError(
                f"{self._texts.group} cannot be used any more: a thread was interrupted in a send or receive"))
            raise
        finally:
            self._end_finished()
        return None

    def _end_finished(self) -> None:
        while True:
            try:
                call, error = self._over.popleft()
            except IndexError:
                return
            try:
                call.end(error)
            except Exception:
                _log.exception("%s: a callback of the %s failed", self._texts.group, self._texts.shown(call))

    def _destroyed(self) -> HorovodInternalError:
        return HorovodInternalError(f"{self._texts.group} was destroyed on this rank before the call was complete")

    def _go_on(self, call: Transfer) -> None:
        """Do what can be done at once for a call that has begun, and see to it that the rest is done."""
        raise NotImplementedError

    # --- with the lock ---------------------------------------------------------------------------------------------------

    def _begin_send(self, call: Send) -> None:
        raise NotImplementedError

    def _begin_receive(self, call: Receive) -> None:
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        for call in tuple(self._calls):
            self._finish(call, self._error)

    def _finish(self, call: Transfer, error: Exception | None = None) -> None:
        del self._calls[call]
        self._over.append((call, error))
