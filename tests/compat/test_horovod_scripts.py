"""Scripts as one writes them for Horovod run without a change, under `hvdrun --horovod-compat`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import HVDRUN, PYTHON_PATH, ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

def run(script: str, *arguments: str) -> str:
    result = subprocess.run([*HVDRUN, "-np", "2", "--horovod-compat", "--no-prefix",
                             sys.executable, str(Path(__file__).parent / "programs" / script), *arguments],
                            capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": PYTHON_PATH})
    assert result.returncode == 0 and result.stdout.count("done") == 2, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("flags", [[], ["--use-adasum"], ["--fp16-allreduce", "--gradient-predivide-factor", "2"]])
def test_training(flags: list[str]) -> None:
    losses = [float(line.split()[-1]) for line in run("training.py", *flags).splitlines() if line.startswith("epoch")]
    assert len(losses) == 3


def test_the_synthetic_benchmark() -> None:
    assert "Total img/sec on 2 ranks" in run("synthetic.py")


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@pytest.mark.parametrize("script", ["tape.py", "keras_fit.py"], ids=["tape", "keras"])
def test_tensorflow_and_keras(script: str) -> None:
    run(script)


def test_process_sets_samplers_loaders_and_helpers() -> None:
    run("sets_and_samplers.py")


def test_the_names_are_the_same_modules() -> None:
    subprocess.run([sys.executable, str(Path(__file__).parent / "programs/same_modules.py")], check=True, cwd=ROOT)
