"""A real `Trainer.fit` on two ranks equals one process with the whole batch; metrics are over all ranks; no elastic jobs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.worlds import TORCH, processes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")


@pytest.mark.slow
def test_fits_and_metrics_on_two_ranks(tmp_path: Path) -> None:
    processes(2, Path(__file__).parent / "programs/lightning_fit.py", str(tmp_path), timeout=150, imported=TORCH)
