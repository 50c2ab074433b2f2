"""The guides are right: their code is one script, which two ranks run, and it prints what stands below each block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.tf.support import ENVIRONMENT, imported
from tests.worlds import TORCH, processes

DOCS = Path(__file__).resolve().parents[2] / "docs"
NUMBER = re.compile(r"\d+\.\d+")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("guide", "framework", "modules"), [("start", "torch", TORCH), ("pytorch", "torch", TORCH),
                                                             ("keras", "keras", imported("tensorflow"))])
def test_a_guide_prints_what_it_shows(guide: str, framework: str, modules: Sequence[str], tmp_path: Path) -> None:
    pytest.importorskip(framework)
    pytest.importorskip("safetensors")
    text = (DOCS / f"{guide}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    script = tmp_path / "train.py"
    script.write_text("\n".join([f"import os\nos.chdir({str(tmp_path)!r})", *blocks]), encoding="utf-8")
    ended = processes(2, script, imported=modules, environment=ENVIRONMENT)
    assert text.count("[0]<stdout>:") >= 3
    for rank, each in enumerate(ended):
        shown = re.findall(rf"^\[{rank}\]<stdout>:(.*)$", text, re.MULTILINE)
        printed = each.stdout.splitlines()
        assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in shown]
        assert [float(found) for found in NUMBER.findall(each.stdout)] == pytest.approx(
            [float(found) for line in shown for found in NUMBER.findall(line)], abs=0.05)
