"""Buffers are broadcast when DDP broadcasts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch.programs import buffers as programs
from tests.worlds import TORCH, processes

pytest.importorskip("torch")


def test_buffers_are_broadcast_when_ddp_does(tmp_path: Path) -> None:
    processes(2, programs.buffers_are_broadcast_when_ddp_does, str(tmp_path), imported=TORCH)
