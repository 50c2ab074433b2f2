"""What a job shows and writes: the console with its prefixes, the files of `--output-filename`, and hvdrun's own lines."""

from __future__ import annotations

import errno
import os
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import OUTPUT_LOST
from hvdlite.core.texts import printable
from hvdlite.diagnostics.progress import Reading
from hvdlite_runner.messages import Output, ProgressReply, Started
from hvdlite_runner.output.console import Console, OutputSettings
from hvdlite_runner.output.streams import OutputTarget, Streams
from hvdlite_runner.placement import LOCAL

READER_SECONDS: Final = 300.0
"""Seconds to wait at the end for a reader that takes nothing."""
READER_SECONDS_AFTER_SIGNAL: Final = 1.0
"""The same after the user's signal."""
_NOTE_SECONDS: Final = 3.0
"""Seconds until the user is informed that there is a wait."""


class ProgressObserver:
    """A receiver of the ranks' progress, which does nothing with it.

    Attributes:
        wants_samples: whether the ranks' progress is read each second, and not at their end only.
    """

    wants_samples = False

    def attach(self, write: Callable[[str], None], is_busy: Callable[[], bool]) -> None:
        """Begin with a job.

        Args:
            write: writes text to the terminal, after the job's output.
            is_busy: returns whether the terminal takes nothing at the moment.
        """

    def begin_world(self, rank_hosts: Mapping[int, str]) -> None:
        """Take the host of each rank: of a job's ranks once, of an elastic job's again for each world."""

    def take(self, host: str, event: ProgressReply) -> None:
        """Take the progress of a host's ranks."""

    def ended(self, rank: int, reading: Reading) -> None:
        """Take the last progress of a rank that has ended."""

    def clear_table(self) -> None:
        """Remove the table, because something else is about to be written on the terminal."""

    def finish(self) -> None:
        """End the output, because the job is over."""

    def noted(self, text: str) -> None:
        """Take a line that hvdrun has written about the job."""

    def closed(self, code: int | None) -> None:
        """Take the exit code, which is the last; None for a job that could not begin."""


class Observers(ProgressObserver):
    """Passes everything on to several observers."""

    def __init__(self, observers: Sequence[ProgressObserver]) -> None:
        self.wants_samples = any(each.wants_samples for each in observers)
        for name in ("attach", "begin_world", "take", "ended", "clear_table", "finish", "noted", "closed"):
            setattr(self, name, partial(_call_all, [getattr(each, name) for each in observers]))


def _call_all(functions: Sequence[Callable[..., None]], *args: Any) -> None:
    for function in functions:
        function(*args)


class JobOutput:
    """The output of a job's processes. A process has a key: its rank, or in an elastic job its member's id.

    Args:
        observer: shows a table on the same terminal.
        rank_of: returns the rank of a process; -1 for none.
    """

    def __init__(self, settings: OutputSettings, observer: ProgressObserver, rank_of: Callable[[int], int] = int,
                 stdout: int = 1, stderr: int = 2) -> None:
        self._settings = settings
        self._observer = observer
        self.console = Console(self._write, settings, rank_of)
        self._pause: Callable[[bool], None] = lambda paused: None
        self._streams = Streams(lambda paused: self._pause(paused), self._failed, stdout, stderr)
        self._encodings = {name: getattr(getattr(sys, name), "encoding", None) or "utf-8" for name in ("stdout", "stderr")}
        self._files: dict[tuple[int, str], OutputTarget] = {}
        self._a_file_failed = False
        observer.attach(lambda text: self._streams.write("stderr", self._encoded("stderr", text)),
                        lambda: self._streams.is_busy("stderr"))

    def watch(self, selector: selectors.BaseSelector, pause: Callable[[bool], None]) -> None:
        """Let the owner's loop wake up for what happens to the output.

        Args:
            selector: its keys' `data` are functions to call.
            pause: called to stop reading from the processes, and to read again.
        """
        self._pause = pause
        self._streams.watch(selector)

    def expect(self, processes: int) -> None:
        """Set the number of processes, whose tracebacks and, if that is wanted, lines are folded into one."""
        self.console.processes = processes
        if self._settings.fold:
            self.console.fold = processes

    def open_files(self, key: int, folder_name: str) -> None:
        """Create the files for a process's output, if requested.

        Raises:
            LaunchError: when they cannot be created.
        """
        if self._settings.directory is None:
            return
        base = Path(self._settings.directory)
        try:
            base.mkdir(parents=True, exist_ok=True)
            folder = self._streams.open_folder(base / folder_name)
            try:
                for name in ("stdout", "stderr"):
                    self._files[key, name] = self._streams.open_file(folder, name, f"{folder_name}/{name}")
            finally:
                os.close(folder)
        except OSError as error:
            path = base / folder_name / error.filename if error.filename in ("stdout", "stderr") else error.filename
            reason = f"{path}: {error.strerror}"
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
                reason = f"{path} is a symbolic link, which hvdrun does not follow: remove it"
            raise LaunchError(f"cannot write to --output-filename {self._settings.directory}: {reason}") from None

    def feed(self, event: Output) -> None:
        """Show output of a process, and write it to its file."""
        self.console.feed(event.key, event.stream, event.content)
        target = self._files.get((event.key, event.stream))
        if target is not None and event.content:
            self._streams.write_file(target, event.content)

    def started(self, who: str, event: Started, host: str, *, verbose: bool) -> None:
        """Write that a process runs without the cores to which it was to be bound, and, verbosely, its id."""
        where = "" if host == LOCAL else f" on {host}"
        if verbose:
            self.note(f"{who} is process {event.pid}{where}")
        if event.unbound:
            self.note(f"{who}{where} may run on any core: this system does not bind it to some (--bind): {event.unbound}")

    def note(self, text: str, *, is_failure: bool = False) -> None:
        """Write a line of hvdrun's own; what it quotes of other programs cannot control the terminal.

        Args:
            is_failure: whether it is written with `-q`, too.
        """
        self._observer.noted(text)
        if is_failure or not self._settings.quiet:
            self.console.note(printable(f"hvdrun: {text}"))

    def close_files(self, key: int) -> None:
        """Close the files of a process that has ended."""
        for name in ("stdout", "stderr"):
            target = self._files.pop((key, name), None)
            if target is not None:
                self._streams.close_file(target)

    def finish(self) -> None:
        """Write unfinished lines, and close all files."""
        self.console.finish()
        for key, _ in list(self._files):
            self.close_files(key)

    def close(self, code: int, user_signal: int, later_signal: Callable[[], int]) -> int:
        """Wait for the readers of the output, and inform the user if some of it is lost; return hvdrun's exit code.

        Args:
            code: the job's exit code.
            user_signal: the signal by which the user has ended the job; 0 for none.
            later_signal: returns a signal that came later: it ends the wait.
        """
        patience = READER_SECONDS_AFTER_SIGNAL if user_signal else READER_SECONDS
        begun, is_noted = time.monotonic(), False

        def gives_up() -> bool:
            nonlocal is_noted
            if not is_noted and time.monotonic() > begun + _NOTE_SECONDS and not self._streams.is_busy("stderr"):
                is_noted = True
                self.note("the job has ended; waiting for the reader of its output (Ctrl-C ends hvdrun)")
            return bool(later_signal())

        is_written = self._streams.flush(patience, gives_up)
        if not is_written and self._streams.lost():
            self.note(f"the last {self._streams.lost():,} bytes of output were not read, and are lost", is_failure=True)
            self._streams.flush(READER_SECONDS_AFTER_SIGNAL, lambda: False)
        self._streams.close()
        if not user_signal and later_signal():
            return 128 + later_signal()
        return OUTPUT_LOST if code == 0 and self._streams.lost() else code

    def _failed(self, target: OutputTarget) -> None:
        """Inform the user, once, that a stream or a file gets nothing more."""
        if target.label.startswith("standard"):
            self.note(f"{target.label}: {target.reason()}; the job goes on without it", is_failure=True)
        elif not self._a_file_failed:
            self._a_file_failed = True
            self.note(f"--output-filename {self._settings.directory}: {target.label}: {target.reason()}; the file "
                      "ends here, and others may too", is_failure=True)

    def _write(self, name: str, text: str) -> None:
        self._observer.clear_table()
        self._streams.write(name, self._encoded(name, text))

    def _encoded(self, name: str, text: str) -> bytes:
        return text.encode(self._encodings[name], "replace")
