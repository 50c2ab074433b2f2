"""Scripts as one writes them for Horovod run without a change, under `hvdrun --horovod-compat`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.running import run_for_horovod
from tests.tf.support import ENVIRONMENT, imported
from tests.worlds import HVDRUN, PYTHON_PATH, ROOT, TORCH, processes

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"


def run(script: str, *arguments: str, keras: bool = False) -> str:
    """Run a script on two ranks that begin with its framework imported; return what they print."""
    imports, environment = (imported("tensorflow"), ENVIRONMENT) if keras else (TORCH, None)
    ended = processes(2, run_for_horovod, str(PROGRAMS / script), *arguments, timeout=120, imported=imports,
                      environment=environment)
    assert all(rank.stdout.count("done") == 1 for rank in ended), ended
    return "".join(rank.stdout for rank in ended)


def epochs(printed: str) -> list[float]:
    return [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("epoch")]


@pytest.mark.long
def test_training_under_hvdrun() -> None:
    """The flag with another script, and the script alone: test_elastic.py, `test_training`."""
    result = subprocess.run([*HVDRUN, "-np", "2", "--horovod-compat", "--no-prefix", sys.executable,
                             str(PROGRAMS / "training.py")],
                            capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": PYTHON_PATH})
    assert result.returncode == 0 and result.stdout.count("done") == 2, result.stdout + result.stderr
    assert len(epochs(result.stdout)) == 3


@pytest.mark.parametrize("flags", [["--use-adasum"], ["--fp16-allreduce", "--gradient-predivide-factor", "2"]])
def test_training(flags: list[str]) -> None:
    assert len(epochs(run("training.py", *flags))) == 3


def test_the_synthetic_benchmark() -> None:
    assert "Total img/sec on 2 ranks" in run("synthetic.py")


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@pytest.mark.parametrize("script", ["tape.py", "keras_fit.py"], ids=["tape", "keras"])
def test_tensorflow_and_keras(script: str) -> None:
    run(script, keras=True)


def test_process_sets_samplers_loaders_and_helpers() -> None:
    run("sets_and_samplers.py")


def test_an_elastic_script_without_an_elastic_launcher() -> None:
    run("elastic.py")


def test_the_names_are_the_same_modules() -> None:
    subprocess.run([sys.executable, str(Path(__file__).parent / "programs/same_modules.py")], check=True, cwd=ROOT)
