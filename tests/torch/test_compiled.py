"""`torch.compile` around a whole training step."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.torch.programs.compiled import a_compiled_step_is_as_in_one_process
from tests.worlds import TORCH, processes


def test_a_compiled_step_is_as_in_one_process() -> None:
    processes(2, a_compiled_step_is_as_in_one_process, imported=TORCH)
