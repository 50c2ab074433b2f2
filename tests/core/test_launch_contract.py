"""What ranks write for their launcher survives the disk."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from hvdlite.core.launch_contract import FailureRecord


def record(rank: int, origin: int, when: float) -> FailureRecord:
    return FailureRecord(rank, origin, when, "ValueError", "boom", "Traceback:\n  here")


def test_records_survive_the_disk(tmp_path: Path) -> None:
    record(3, 1, 2.0).write(str(tmp_path))
    assert FailureRecord.read(str(tmp_path), 3) == record(3, 1, 2.0)
    assert FailureRecord.read(str(tmp_path), 4) is None
    FailureRecord.path(str(tmp_path), 4).write_text("{half")
    assert FailureRecord.read(str(tmp_path), 4) is None
    record(3, 1, 2.0).write(str(tmp_path / "gone"))  # nobody is left to read it


def test_a_full_disk_does_not_hide_the_exception_that_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(json, "dump", refuse)
    record(3, 1, 2.0).write(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
