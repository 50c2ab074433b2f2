"""What a runtime changes in its process: logging, a signal that asks for reports, and reports of exceptions that end it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType, TracebackType
from typing import Any, Final

from hvdlite.core import launch_contract
from hvdlite.core.config import Config
from hvdlite.core.errors import HvdliteError, PeerLostError
from hvdlite.core.texts import LONGEST_TRACEBACK, shortened, text_of
from hvdlite.runtime import tracebacks
from hvdlite.runtime.runtime import Runtime

_log = logging.getLogger("hvdlite")

_STOPS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))
_LEFT_AT: Final = "_hvdlite_left_at"
"""The attribute of an exception that has the time when a process first left its job or a group because of it."""


def configure_logging(config: Config, rank: Callable[[], int]) -> None:
    """Write log messages to standard error, unless the script has set up logging itself."""
    _log.setLevel(config.log_level)
    if not _log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter(rank, "" if config.log_hide_time else "%(asctime)s "))
        _log.addHandler(handler)
        _log.propagate = False


class _Formatter(logging.Formatter):
    """Begins each message with the rank, which changes in elastic jobs."""

    def __init__(self, rank: Callable[[], int], when: str) -> None:
        super().__init__(f"{when}[%(rank)s] %(name)s %(levelname)s: %(message)s")
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        record.rank = self._rank()
        return super().format(record)


def answer_signal(signum: int, current: Callable[[], Runtime | None]) -> None:
    """Let a signal ask for a report, unless the script has a use for it."""
    if not signum:
        return
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signum) is not signal.SIG_DFL:
        _log.warning("signal %d does not ask for reports (HVDLITE_REPORT_SIGNAL): it is handled already, or init() was not "
                     "called in the main thread", signum)
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        runtime = current()
        if runtime is not None and not runtime.in_child:
            runtime.request_report()

    signal.signal(signum, ask)


class StopNotice:
    """Signals that ask this process to stop: SIGTERM, and those with which schedulers warn.

    Attributes:
        is_given: whether one has come while this watched.
    """

    def __init__(self) -> None:
        self.is_given = False
        self._before: dict[int, Any] = {}  # handlers, by the signals that are watched
        self._tell: Callable[[], bool] | None = None
        self._has_warned = self._is_at_fork = False
        self._held = threading.local()  # signals that a thread blocks, from before it forks

    def watch(self, others: Collection[int]) -> None:
        """Handle the signals from now on; handlers that there were are still called.

        Call it again and again: others may take the signals over.

        Args:
            others: signals with another meaning.
        """
        self._tell = None  # the script asks by itself
        taken = [signum for signum in _STOPS if signum not in others and signal.getsignal(signum) != self._handle]
        if not taken:
            return
        if threading.current_thread() is not threading.main_thread():
            if not self._has_warned:
                self._has_warned = True
                _log.warning("stop_requested() hears of no signal: call it in the main thread first")
            return
        self._take(taken)

    @contextlib.contextmanager
    def telling(self, tell: Callable[[], bool]) -> Iterator[None]:
        """Call a function at SIGTERM meanwhile; the process goes on if it returns True (docs/protocol.md#notices).

        Nothing is done outside of the main thread, and where the script handles the signal or asks `stop_requested`.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._tell = tell
            self._take([signal.SIGTERM])
        try:
            yield
        finally:
            if self._tell is not None:
                self._tell = None
                self.release()

    def _take(self, signums: Collection[int]) -> None:
        if not self._is_at_fork:
            self._is_at_fork = True
            os.register_at_fork(before=self._before_fork, after_in_parent=self._unblock, after_in_child=self._in_child)
        for signum in signums:
            self._before[signum] = signal.signal(signum, self._handle)

    def _before_fork(self) -> None:
        """Hold signals back, or those that come before a child has its own handlers are lost there."""
        self._held.before = signal.pthread_sigmask(signal.SIG_BLOCK, list(self._before))

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.before)

    def _in_child(self) -> None:
        self.release()  # or nobody could end the script's own workers
        self._unblock()

    def release(self) -> None:
        """Put the handlers back that there were before."""
        for signum, handler in self._before.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._tell is not None:
            if not self._tell():
                signal.signal(signum, signal.SIG_DFL)
                signal.raise_signal(signum)
            return
        self.is_given = True
        before = self._before.get(signum)
        if callable(before):
            before(signum, frame)


def tell_failure(runtime: Runtime, error: BaseException) -> tuple[int, str]:
    """Tell the other ranks of an exception; return the rank where it began, and its traceback as text."""
    text = tracebacks.text_of(error)
    origin = origin_of(error, runtime.failure, runtime.world.rank)
    text = shortened(text, LONGEST_TRACEBACK)
    runtime.fail(type(error).__name__, text_of(error), text, origin)
    return origin, text


def origin_of(error: BaseException, failure: BaseException | None, rank: int) -> int:
    """Return the rank where the failure of a rank began.

    Args:
        error: ends the rank; what it was raised from counts, too.
        failure: of the rank's runtime. A framework's exception may not mention that it follows from it.
        rank: what is returned if neither names another rank.
    """
    return next((known.rank for known in (*tracebacks.causes(error), failure)
                 if isinstance(known, PeerLostError) and known.rank >= 0), rank)


def leaves_because_of(error: BaseException) -> None:
    """This process leaves the job, or a group, and handles an exception: if that ends the process, it failed now."""
    error.__dict__.setdefault(_LEFT_AT, time.time())


def record_failure(directory: str, error: BaseException, process: int, origin: int, text: str, *, shown: bool) -> None:
    """Report to the launcher why this process ends, and when it failed: now, or when it left because of the exception.

    Args:
        directory: the job's.
        process: this process's rank; in an elastic job, its member id.
        origin: that of the process where it began.
        text: the traceback.
        shown: whether it was printed to standard error.
    """
    when = error.__dict__.get(_LEFT_AT, time.time())
    launch_contract.FailureRecord(process, origin, when, type(error).__name__, text_of(error), text, shown).write(
        directory)


def shorten_uncaught() -> None:
    """Let an error of hvdlite that ends a process before `init()` be printed without hvdlite's frames, as it is in a job."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_shortened


def _print_shortened(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    if isinstance(error, HvdliteError) and sys.stderr is not None:
        sys.stderr.write(tracebacks.text_of(error))
    else:
        sys.__excepthook__(kind, error, where)


def report_uncaught(end_with: Callable[..., bool]) -> None:
    """Report an exception that ends the process.

    Args:
        end_with: called as `end_with(error, prints=True)`, to print the exception in hvdlite's way, unless another hook was
            installed before; if it returns False, the exception is printed as usual, and `prints=False` follows.
    """
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        is_plain = previous in (sys.__excepthook__, _print_shortened)
        if is_plain and isinstance(error, Exception) and end_with(error, prints=True):
            return
        previous(kind, error, where)
        sys.stderr.flush()
        end_with(error, prints=False)

    sys.excepthook = excepthook
