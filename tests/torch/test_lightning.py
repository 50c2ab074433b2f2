"""A real `Trainer.fit` on two ranks equals one process with the whole batch; metrics are over all ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from tests.worlds import TORCH, processes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")


@pytest.mark.slow
def test_fits_and_metrics_on_two_ranks(tmp_path: Path) -> None:
    processes(2, Path(__file__).parent / "programs/lightning_fit.py", str(tmp_path), timeout=150, imported=TORCH)


def test_an_elastic_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import hvdlite_torch as hvd
    from hvdlite_torch.lightning import HvdliteStrategy
    monkeypatch.setattr(hvd, "init", lambda: None)
    monkeypatch.setattr(api, "is_elastic", lambda: True)
    with pytest.raises(UnsupportedError, match=r"HvdliteStrategy does not work in an elastic job.*TorchState"):
        HvdliteStrategy()
