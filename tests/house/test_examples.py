"""The example runs, learns, and finds its data; on small data where the real set is not installed."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.slow
sys.path.insert(0, str(EXAMPLES))

import fashion_mnist  # noqa: E402


def run(*arguments: str, size: int = 2, script: str = "pytorch_fashion_mnist.py") -> subprocess.CompletedProcess[str]:
    needed = "torch" if script.startswith("pytorch") else "tensorflow"
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    return subprocess.run([sys.executable, "-m", "hvdlite_runner.cli", "-np", str(size), sys.executable,
                           str(EXAMPLES / script), *arguments], capture_output=True, text=True, timeout=150, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"})


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy ([\d.]+)", text)]


def test_training_checkpoint_and_resume(small: Path, tmp_path: Path) -> None:
    common = ("--data-dir", str(small), "--batch-size", "16", "--workers", "1", "--checkpoint", str(tmp_path / "model.pt"))
    first = run(*common, "--epochs", "3")
    assert first.returncode == 0, first.stderr
    assert len(accuracies(first.stdout)) == 3 and accuracies(first.stdout)[-1] > 0.9
    assert first.stdout.count("[1]<stdout>") == 0, "only rank 0 prints"
    again = run(*common, "--epochs", "4", "--compression", "bf16", size=1)
    assert again.returncode == 0 and again.stdout.count("epoch ") == 1 and "epoch 4" in again.stdout
    done = run(*common, "--epochs", "4", "--minimum-accuracy", "0.9", size=1)
    assert done.returncode == 0 and "trained 4 epochs already" in done.stdout, done.stderr


def test_keras_checkpoint_and_resume(small: Path, tmp_path: Path) -> None:
    common = ("--data-dir", str(small), "--batch-size", "16", "--checkpoint", str(tmp_path / "model.keras"))
    first = run(*common, "--epochs", "3", script="keras_fashion_mnist.py")
    assert first.returncode == 0, first.stderr
    assert len(accuracies(first.stdout)) == 3 and accuracies(first.stdout)[-1] > 0.9
    assert first.stdout.count("[1]<stdout>") == 0, "only rank 0 prints"
    again = run(*common, "--epochs", "4", script="keras_fashion_mnist.py")
    assert again.returncode == 0 and again.stdout.count("epoch ") == 1 and "epoch 4" in again.stdout, again.stderr


def test_a_custom_tensorflow_loop(small: Path) -> None:
    ended = run("--data-dir", str(small), "--batch-size", "16", "--epochs", "3", script="tensorflow_fashion_mnist.py")
    assert ended.returncode == 0 and accuracies(ended.stdout)[-1] > 0.9, ended.stderr


def test_the_scope_of_a_strategy(small: Path) -> None:
    common = ("--data-dir", str(small), "--batch-size", "32", "--epochs", "3")
    ended = run(*common, script="keras_mirrored_scope.py")
    assert ended.returncode == 0 and accuracies(ended.stdout)[-1] > 0.9, ended.stderr
    assert ended.stdout.count("[1]<stdout>") == 0, "only rank 0 prints"


def test_a_scope_in_torch(small: Path) -> None:
    curves = [run("--data-dir", str(small), "--batch-size", "32", "--epochs", "3", "--lr", "0.01", size=size,
                  script="pytorch_mirrored_scope.py") for size in (1, 2)]
    for ended, size in zip(curves, (1, 2), strict=True):
        assert ended.returncode == 0, ended.stderr
        assert len(accuracies(ended.stdout)) == 3 and accuracies(ended.stdout)[-1] > 0.9
        assert ended.stdout.count(f"images/s on {size} ranks") == 3, "only rank 0 prints"
    losses = [[float(found) for found in re.findall(r"test loss ([\d.]+)", ended.stdout)] for ended in curves]
    assert losses[0] == pytest.approx(losses[1], rel=0.02), "the same initial model, the same batches"
    assert len((EXAMPLES / "pytorch_mirrored_scope.py").read_text(encoding="utf-8").splitlines()) < 60


def test_too_low_an_accuracy_fails(small: Path) -> None:
    ended = run("--data-dir", str(small), "--epochs", "1", "--lr", "0", "--minimum-accuracy", "0.99")
    assert ended.returncode == 1 and "is below 0.99" in ended.stderr


@pytest.mark.skipif(not fashion_mnist.DEBIAN.exists(), reason="the real data set is not installed")
def test_on_the_real_data() -> None:
    ended = run("--epochs", "1", "--limit", "6400", "--batch-size", "16", "--lr", "0.005", "--minimum-accuracy", "0.7",
                size=4)
    assert ended.returncode == 0, ended.stderr


def test_missing_data_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist") as caught:
        fashion_mnist.find(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ValueError, match="not an IDX file"):
        (tmp_path / "x.gz").write_bytes(gzip.compress(b"garbage"))
        fashion_mnist._read(tmp_path / "x.gz")
