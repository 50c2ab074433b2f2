"""What is particular about gradients that torch computes on a thread of its own, as it does for each GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.worlds import HANGS_SECONDS

torch = pytest.importorskip("torch")
backends = pytest.importorskip("torch.utils.backend_registration")


@pytest.mark.skipif(not hasattr(backends, "_setup_privateuseone_for_python_backend"),
                    reason="needs a torch that lets Python define a device")
@pytest.mark.parametrize("case", [pytest.param("checkpoints", marks=pytest.mark.long), "interrupt"])
def test_on_a_thread_of_torchs_own(case: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "tests.torch.programs.device_threads", case], capture_output=True,
                           text=True, check=False, timeout=HANGS_SECONDS)
    assert ended.returncode == 0 and "done" in ended.stdout, ended.stdout + ended.stderr
