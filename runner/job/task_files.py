"""The folder of `hvdlite.run`, on the caller's side: the function for the ranks, their results, and the first failure."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hvdlite.core import launch_contract
from hvdlite_runner.host.worker_group import append_private_file, pieces_of
from hvdlite_runner.messages import PIECE_BYTES, Result


class TaskFiles:
    """The folder of a task, which the caller has made; without a folder nothing is read or written.

    Attributes:
        is_abandoned: whether the caller has ended.
        problem: the reason why a result could not be kept; "" for none.
    """

    def __init__(self, directory: str | None) -> None:
        self.is_abandoned = False
        self.problem = ""
        self._directory = None if directory is None else Path(directory)

    def watch_caller(self, selector: selectors.BaseSelector, ended: Callable[[], None]) -> None:
        """Call `ended` when the caller has ended: standard input ends then."""
        def read() -> None:
            if not os.read(0, 4096):
                selector.unregister(0)
                self.is_abandoned = True
                ended()

        if self._directory is not None:
            selector.register(0, selectors.EVENT_READ, read)

    def pieces(self) -> Iterator[bytes]:
        """Yield the function and its arguments, signed, in pieces."""
        if self._directory is not None:
            for content, _ in pieces_of(self._directory / launch_contract.TASK_FILE, PIECE_BYTES):
                yield content

    def key(self) -> str:
        """Return the job's key: the caller's, or a new one."""
        if self._directory is None:
            return secrets.token_hex()
        return (self._directory / launch_contract.KEY_FILE).read_text(encoding="ascii")

    def write_result(self, piece: Result) -> None:
        """Write a piece of the result of a rank, or of a member of an elastic job; the last one completes it."""
        if self._directory is None or self.problem:
            return
        path = self._directory / f"{launch_contract.RESULT_FILE}.{piece.key}"
        try:
            append_private_file(path.with_name(f"partial.{piece.key}"), piece.content)
            if piece.is_last:
                path.with_name(f"partial.{piece.key}").rename(path)
        except OSError as error:
            self.problem = (f"cannot keep the results of the ranks in {self._directory} on {socket.gethostname()}: "
                            f"{error.strerror}; make room there, or set TMPDIR to a place that has it")

    def write_cause(self, rank: int, text: str) -> None:
        """Write the first failure."""
        self._write(launch_contract.CAUSE_FILE, json.dumps({"rank": rank, "text": text}))

    def write_members(self, members: Sequence[int]) -> None:
        """Write the ranks of the job, or the members of an elastic job's last world: their results are those of the job."""
        self._write(launch_contract.MEMBERS_FILE, json.dumps(list(members)))

    def _write(self, name: str, text: str) -> None:
        if self._directory is not None:
            try:
                (self._directory / name).write_text(text, encoding="utf-8")
            except OSError as error:
                self.problem = f"cannot write to {self._directory}: {error.strerror}"

    def remove_abandoned(self) -> None:
        """Remove the folder if the caller cannot do so any more."""
        if self.is_abandoned and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
