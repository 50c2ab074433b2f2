"""The folder of `hvdlite.run`, on the caller's side: the function for the ranks, their results, and the first failure."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdlite.core import launch_contract


class TaskFiles:
    """The folder of a task, which the caller has made; without a folder nothing is read or written.

    Attributes:
        is_abandoned: whether the caller has ended.
    """

    def __init__(self, directory: str | None) -> None:
        self.is_abandoned = False
        self._directory = None if directory is None else Path(directory)

    @property
    def exists(self) -> bool:
        """Whether the job runs a task."""
        return self._directory is not None

    def watch_caller(self, selector: selectors.BaseSelector, ended: Callable[[], None]) -> None:
        """Call `ended` when the caller has ended: standard input ends then."""
        def read() -> None:
            if not os.read(0, 4096):
                selector.unregister(0)
                self.is_abandoned = True
                ended()

        if self.exists:
            selector.register(0, selectors.EVENT_READ, read)

    def payload(self) -> bytes:
        """Return the function and its arguments, signed."""
        return b"" if self._directory is None else (self._directory / launch_contract.TASK_FILE).read_bytes()

    def key(self) -> str:
        """Return the job's key: the caller's, or a new one."""
        if self._directory is None:
            return secrets.token_hex()
        return (self._directory / launch_contract.KEY_FILE).read_text(encoding="ascii")

    def write_result(self, rank: int, content: bytes) -> None:
        """Write the result of a rank, or of a member of an elastic job."""
        if self._directory is not None:
            (self._directory / f"{launch_contract.RESULT_FILE}.{rank}").write_bytes(content)

    def write_cause(self, rank: int, text: str) -> None:
        """Write the first failure."""
        if self._directory is not None:
            (self._directory / launch_contract.CAUSE_FILE).write_text(json.dumps({"rank": rank, "text": text}),
                                                                      encoding="utf-8")

    def write_members(self, members: Sequence[int]) -> None:
        """Write the members of an elastic job's last world, by rank: their results are those of the job."""
        if self._directory is not None:
            (self._directory / launch_contract.MEMBERS_FILE).write_text(json.dumps(list(members)), encoding="utf-8")

    def remove_abandoned(self) -> None:
        """Remove the folder if the caller cannot do so any more."""
        if self.is_abandoned and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
