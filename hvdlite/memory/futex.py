"""Futexes: threads of several processes sleep until a word in shared memory changes (Linux)."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from typing import Any, Final

_NUMBERS: Final = {"x86_64": 202, "amd64": 202}
"""The system call by machine. Machines that reorder stores are not among them; see `memory/fence.py`."""
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
POLL_SECONDS: Final = 0.0005
"""How long a thread sleeps before it looks again, where there are no futexes."""

AVAILABLE: Final = sys.platform == "linux" and platform.machine().lower() in _NUMBERS and sys.maxsize > 2**32


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Word:
    """A word of 32 bits in memory; keeps the memory alive."""

    def __init__(self, buffer: Any, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(buffer, offset)

    @property
    def value(self) -> int:
        """The word."""
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value


class Futex(_Word):
    """A word of 32 bits in shared memory, on which threads of all processes that map it can sleep.

    Args:
        buffer: the memory, writable; the word keeps it alive.
        offset: of the word, a multiple of 4.
    """

    def __init__(self, buffer: Any, offset: int) -> None:
        super().__init__(buffer, offset)
        self._address = ctypes.byref(self._word)
        self._number = _NUMBERS.get(platform.machine().lower(), -1)
        self._call = ctypes.CDLL(None).syscall  # releases the GIL

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep until the word is changed and `wake` is called, at most `seconds`; return at once if it is not `seen` now.

        May return early; returns at a signal whose handler Python is to run.
        """
        whole = int(seconds)
        timeout = _TimeSpec(whole, int((seconds - whole) * 1e9))
        self._call(self._number, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(timeout), None, 0)

    def wake(self) -> None:
        """Wake all threads that sleep on the word; it has been changed before."""
        self._call(self._number, self._address, _WAKE, _EVERYBODY, None, None, 0)


class PolledWord(_Word):
    """Like `Futex`, on other systems: whoever waits looks again after a short sleep."""

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep for a moment, at most `seconds`, unless the word is not `seen` any more."""
        if self._word.value == seen:
            time.sleep(min(seconds, POLL_SECONDS))

    def wake(self) -> None:
        """Nobody sleeps for long."""


def shared_word(buffer: Any, offset: int) -> Futex | PolledWord:
    """Return a word in shared memory on which threads can sleep, as well as this system can."""
    return Futex(buffer, offset) if AVAILABLE else PolledWord(buffer, offset)
