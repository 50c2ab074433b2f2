"""Writing what a job shows and keeps, in threads: a blocked terminal or disk delays nothing else.

Rules
- Whoever has text to write puts it into a queue and does not wait. While more than `FULL` bytes wait in a queue, the ranks
  are not read: their own writes block, as they would without hvdrun.
- A descriptor that fails (its reader has gone, a full disk) gets nothing more. What it does not get is counted.
- At the end the owner waits for slow readers, and can give up: the threads end with the process.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from hvdlite.core.system_limits import explained

FULL: Final = 1 << 20
"""Bytes that wait for a reader before the ranks are not read any more."""
EMPTY: Final = 1 << 18
"""Bytes below which they are read again."""
_PIECE: Final = 1 << 16
_LOOK_SECONDS: Final = 0.05
_REASONS: Final = {errno.EPIPE: "its reader has gone", errno.EBADF: "it is closed", errno.EIO: "its terminal has gone"}


class OutputTarget:
    """A descriptor to write to.

    Attributes:
        label: its name for people.
        error: the reason why it gets nothing more.
    """

    def __init__(self, descriptor: int, label: str) -> None:
        self.descriptor = descriptor
        self.label = label
        self.error: OSError | None = None

    def reason(self) -> str:
        """Return the reason why it gets nothing more, for people."""
        assert self.error is not None
        return _REASONS.get(self.error.errno or 0, self.error.strerror or str(self.error))


class Queue:
    """The bytes that wait for some descriptors, and the thread that writes them in order.

    Args:
        changed: called by the thread when the queue has become short, and when a target has failed.

    Attributes:
        waiting: bytes that are not written yet.
        written: bytes that are.
        lost: bytes that could not be written.
        failed: targets that have failed; the owner removes them.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.waiting = self.written = self.lost = 0
        self.failed: deque[OutputTarget] = deque()
        self._changed = changed
        self._condition = threading.Condition()
        self._parts: deque[tuple[OutputTarget, bytes | None]] = deque()  # None: close the target
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def put(self, target: OutputTarget, content: bytes | None) -> None:
        """Write bytes to a target; None closes it."""
        with self._condition:
            self._parts.append((target, content))
            self.waiting += len(content or b"")
            self._condition.notify()
        self.start()

    def start(self) -> None:
        """Start the thread, if it does not run yet: before the ranks, which may take the last processes that are allowed.

        Raises:
            LaunchError: when no thread can be started.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="hvdrun-output", daemon=True)
            with explained("a thread that writes output"):
                thread.start()
            self._thread = thread

    def is_idle(self) -> bool:
        """Return whether everything is written or lost."""
        with self._condition:
            return not self._parts and not self.waiting

    def give_up(self) -> None:
        """Count what waits as lost."""
        with self._condition:
            self._parts.clear()
            self.lost, self.waiting = self.lost + self.waiting, 0

    def end(self) -> bool:
        """End the thread; return whether it has ended: it may be blocked in a write."""
        with self._condition:
            self._has_ended = True
            self._condition.notify()
        if self._thread is not None and self.is_idle():
            self._thread.join(_LOOK_SECONDS)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._parts:
                    if self._has_ended:
                        return
                    self._condition.wait()
                target, content = self._take()
            if content is None:
                os.close(target.descriptor)
            else:
                self._write(target, content)

    def _take(self) -> tuple[OutputTarget, bytes | None]:
        """Remove the first bytes, with those that follow for the same target."""
        target, content = self._parts.popleft()
        if content is None:
            return target, None
        pieces, size = [content], len(content)
        while size < _PIECE and self._parts and self._parts[0][0] is target:
            content = self._parts[0][1]
            if content is None:
                break
            del self._parts[0]
            pieces.append(content)
            size += len(content)
        return target, b"".join(pieces)

    def _write(self, target: OutputTarget, content: bytes) -> None:
        rest = memoryview(content)
        while rest and target.error is None:
            try:
                count = write_some(target.descriptor, rest)
            except OSError as error:
                target.error = error
                self.failed.append(target)
                self._changed()
            else:
                rest = rest[count:]
                self._done(count, 0)
        self._done(0, len(rest))

    def _done(self, written: int, lost: int) -> None:
        with self._condition:
            was_long = self.waiting >= EMPTY
            count = min(written + lost, self.waiting)  # 0 after `give_up`
            self.waiting -= count
            self.written += written
            self.lost += min(lost, count)
            became_short = was_long and self.waiting < EMPTY
        if became_short:
            self._changed()


class Streams:
    """The launcher's own standard output and error, and the files of its ranks.

    Args:
        overloaded: called with whether more bytes wait than should, when that changes.
        failed: called once with each target that fails.
        stdout, stderr: descriptors.
    """

    def __init__(self, overloaded: Callable[[bool], None], failed: Callable[[OutputTarget], None], stdout: int = 1,
                 stderr: int = 2) -> None:
        self._overloaded = overloaded
        self._failed = failed
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._selector: selectors.BaseSelector | None = None
        self._is_overloaded = False
        self._standard = {"stdout": OutputTarget(stdout, "standard output"),
                          "stderr": OutputTarget(stderr, "standard error")}
        queue = Queue(self._wake)
        self._queues = {"stdout": queue, "stderr": queue if _are_same(stdout, stderr) else Queue(self._wake)}
        self._files = Queue(self._wake)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Start the threads, and let the owner's loop wake up for the callbacks; its keys' `data` are functions to call."""
        for queue in self._all():
            queue.start()
        self._selector = selector
        selector.register(self._reader, selectors.EVENT_READ, self.attend)

    def write(self, name: str, content: bytes) -> None:
        """Write to "stdout" or "stderr", after what was written there before."""
        self._queues[name].put(self._standard[name], content)
        self._check_load()

    @staticmethod
    def open_folder(path: str | os.PathLike[str]) -> int:
        """Create a folder if it does not exist; return a descriptor.

        Raises:
            OSError: when it cannot be created, or is a symbolic link.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def open_file(self, folder: int, name: str, label: str) -> OutputTarget:
        """Create a file in a folder, or empty it.

        Raises:
            OSError: when it cannot be written, or is a symbolic link.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK  # it may be a pipe
        return OutputTarget(os.open(name, flags, 0o644, dir_fd=folder), label)

    def write_file(self, target: OutputTarget, content: bytes) -> None:
        """Write to a file."""
        self._files.put(target, content)
        self._check_load()

    def close_file(self, target: OutputTarget) -> None:
        """Close a file after what was written to it before."""
        self._files.put(target, None)

    def is_busy(self, name: str) -> bool:
        """Return whether the reader of "stdout" or "stderr" has not taken everything yet."""
        return not self._queues[name].is_idle()

    def lost(self) -> int:
        """Return the number of bytes that could not be written."""
        return sum(queue.lost for queue in self._all())

    def attend(self) -> None:
        """Call the callbacks, if there is a reason."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        for queue in self._all():
            while queue.failed:
                self._failed(queue.failed.popleft())
        self._check_load()

    def flush(self, seconds: float, gives_up: Callable[[], bool]) -> bool:
        """Wait until everything is written; return whether it is, or lost for another reason.

        Args:
            seconds: how long to wait for readers while they take nothing.
            gives_up: returns whether to wait no longer.
        """
        written, until = -1, 0.0
        while True:
            was_idle = self._is_idle()
            self.attend()  # it may write about what has failed
            if was_idle and self._is_idle():
                return True
            if (now := sum(queue.written for queue in self._all())) != written:
                written, until = now, time.monotonic() + seconds
            if gives_up() or time.monotonic() > until:
                for queue in self._all():
                    queue.give_up()
                return False
            select.select([self._reader], [], [], _LOOK_SECONDS)

    def close(self) -> None:
        """End the threads when everything is written, and call no callbacks any more."""
        if self._selector is not None:
            self._selector.unregister(self._reader)
            self._selector = None
        if all(queue.end() for queue in self._all()):
            os.close(self._reader)
            os.close(self._writer)

    def _is_idle(self) -> bool:
        return all(queue.is_idle() for queue in self._all())

    def _all(self) -> set[Queue]:
        return {*self._queues.values(), self._files}

    def _check_load(self) -> None:
        waiting = max(queue.waiting for queue in self._all())
        if waiting > FULL if not self._is_overloaded else waiting < EMPTY:
            self._is_overloaded = not self._is_overloaded
            self._overloaded(self._is_overloaded)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full
            os.write(self._writer, b".")


class PatientFile(io.RawIOBase):
    """A file for prints whose descriptor may be non-blocking: it waits until it can write."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, content: Any) -> int:
        """Write a part."""
        return write_some(self._descriptor, memoryview(content).cast("B"))


def write_some(descriptor: int, content: memoryview) -> int:
    """Write a part of `content`, after waiting until that is possible; return the number of bytes.

    Raises:
        OSError: like `os.write`.
    """
    while True:
        try:
            return os.write(descriptor, content[:_PIECE])
        except BlockingIOError:  # another program that has the same pipe or terminal has made it non-blocking
            ready = select.poll()
            ready.register(descriptor, select.POLLOUT)
            ready.poll()


def prepare_standard_streams() -> None:
    """Make prints to non-blocking descriptors wait, and occupy closed descriptors.

    Else another file would get the number of a closed one, and then the ranks' output. Writing to it still fails.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        if descriptor > 2:
            os.close(descriptor)
            break
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not os.get_blocking(stream.fileno()):
            file = io.BufferedWriter(PatientFile(stream.fileno()))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, "replace", line_buffering=name == "stderr"))


def _are_same(first: int, second: int) -> bool:
    """Return whether two descriptors are of one file, terminal or pipe: there the order between them counts."""
    try:
        return os.path.samestat(os.fstat(first), os.fstat(second))
    except OSError:
        return False
