"""What a job shows and writes: the console with its prefixes, the files of `--output-filename`, and hvdrun's own lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from hvdlite.core.errors import LaunchError
from hvdlite_runner.messages import Output
from hvdlite_runner.monitor import ProgressObserver
from hvdlite_runner.output import Console, format_ranks


class OutputSettings(Protocol):
    """The part of a job's settings that is about its output."""

    @property
    def output_directory(self) -> str | None:
        """A folder for the processes' output, if any."""

    @property
    def prefix(self) -> bool:
        """Whether lines begin with their rank."""

    @property
    def timestamps(self) -> bool:
        """Whether lines begin with the time."""

    @property
    def show(self) -> str:
        """"all", "rank0" or "errors"."""

    @property
    def fold(self) -> bool:
        """Whether a line that several ranks print is shown once."""


class JobOutput:
    """The output of a job's processes. A process has a key: its rank, or in an elastic job its member's id.

    Args:
        observer: shows a table on the same terminal.
        names: returns how processes are called in prefixes.
        rank_of: returns the rank of a process, for `--show rank0`.
    """

    def __init__(self, settings: OutputSettings, observer: ProgressObserver | None,
                 names: Callable[[Iterable[int]], str] = format_ranks, rank_of: Callable[[int], int] = int) -> None:
        self._settings, self._observer, self._rank_of = settings, observer, rank_of
        self.console = Console(self._write, self._prefix, shown=self._shown, clock=time.monotonic, names=names)
        self._files: dict[tuple[int, str], int] = {}

    def expect(self, processes: int) -> None:
        """Set the number of processes whose lines are folded into one."""
        if self._settings.fold:
            self.console.fold = processes

    def open_files(self, key: int, folder_name: str) -> None:
        """Create the files for a process's output, if requested.

        Raises:
            LaunchError: when they cannot be created.
        """
        if self._settings.output_directory is None:
            return
        folder = Path(self._settings.output_directory) / folder_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("stdout", "stderr"):
                self._files[key, name] = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise LaunchError(f"cannot write to --output-filename {self._settings.output_directory}: "
                              f"{error.filename}: {error.strerror}") from None

    def feed(self, event: Output) -> None:
        """Show output of a process, and write it to its file."""
        self.console.feed(event.rank, event.stream, event.content)
        descriptor = self._files.get((event.rank, event.stream))
        if descriptor is None:
            return
        try:
            rest = memoryview(event.content)
            while rest:
                rest = rest[os.write(descriptor, rest):]
        except OSError as error:  # a full disk does not end the job
            self.close_files(event.rank)
            self.note(f"--output-filename {self._settings.output_directory}: {error.strerror}; the files of a process end "
                      "here")

    def note(self, text: str) -> None:
        """Write a line of hvdrun's own."""
        self.console.note(f"hvdrun: {text}")

    def close_files(self, key: int) -> None:
        """Close the files of a process that has ended."""
        for name in ("stdout", "stderr"):
            descriptor = self._files.pop((key, name), None)
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        """Write unfinished lines, and close all files."""
        self.console.finish()
        for key, _ in list(self._files):
            self.close_files(key)

    def _write(self, name: str, text: str) -> None:
        if self._observer is not None:
            self._observer.clear_table()
        _write(name, text)

    def _shown(self, key: int, name: str) -> bool:
        return {"all": True, "rank0": self._rank_of(key) == 0, "errors": name == "stderr"}[self._settings.show]

    def _prefix(self, names: str, stream: str) -> str:
        when = f"{time.asctime()} " if self._settings.timestamps else ""
        return f"{when}[{names}]<{stream}>:" if self._settings.prefix else when


def _write(name: str, text: str) -> None:
    """Write to the launcher's own stream; a closed reader or a missing character does not end the job."""
    stream = sys.stdout if name == "stdout" else sys.stderr
    try:
        stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
