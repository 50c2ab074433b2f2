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

from tests.tf.support import ENVIRONMENT, imported
from tests.worlds import HVDRUN, TORCH, processes

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.slow
sys.path.insert(0, str(EXAMPLES))

import fashion_mnist  # noqa: E402


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example as its text says: under hvdrun."""
    pytest.importorskip("torch")
    return subprocess.run([*HVDRUN, "-np", "2", sys.executable, str(EXAMPLES / "pytorch_fashion_mnist.py"), *arguments],
                          capture_output=True, text=True, timeout=150, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def run(*arguments: str, size: int = 2, script: str = "pytorch_fashion_mnist.py") -> str:
    """Run an example on ranks that begin with its framework imported; return what rank 0 prints, and the others do not."""
    needed = "torch" if "torch" in script else "tensorflow"
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    imports, environment = (TORCH, None) if needed == "torch" else (imported("tensorflow"), ENVIRONMENT)
    ended = processes(size, EXAMPLES / script, *arguments, timeout=150, imported=imports, environment=environment)
    assert not any(rank.stdout for rank in ended[1:]), "only rank 0 prints"
    return ended[0].stdout


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy ([\d.]+)", text)]


def test_training_checkpoint_and_resume(small: Path, tmp_path: Path) -> None:
    common = ("--data-dir", str(small), "--batch-size", "16", "--workers", "1", "--checkpoint", str(tmp_path / "model.pt"))
    first = run(*common, "--epochs", "3")
    assert len(accuracies(first)) == 3 and accuracies(first)[-1] > 0.9
    again = run(*common, "--epochs", "4", "--compression", "bf16", size=1)
    assert again.count("epoch ") == 1 and "epoch 4" in again
    assert "trained 4 epochs already" in run(*common, "--epochs", "4", "--minimum-accuracy", "0.9", size=1)


def test_keras_checkpoint_and_resume(small: Path, tmp_path: Path) -> None:
    common = ("--data-dir", str(small), "--batch-size", "16", "--checkpoint", str(tmp_path / "model.keras"))
    first = run(*common, "--epochs", "3", script="keras_fashion_mnist.py")
    assert len(accuracies(first)) == 3 and accuracies(first)[-1] > 0.9
    again = run(*common, "--epochs", "4", script="keras_fashion_mnist.py")
    assert again.count("epoch ") == 1 and "epoch 4" in again


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_elastic_training_without_an_elastic_launcher(small: Path, framework: str) -> None:
    printed = run("--data-dir", str(small), "--batch-size", "16", "--epochs", "4", "--minimum-accuracy", "0.8",
                  script=f"elastic_fashion_mnist_{framework}.py")
    assert len(accuracies(printed)) == 4 and accuracies(printed)[-1] > 0.8 and printed.startswith("2 ranks, processes")


def test_a_custom_tensorflow_loop(small: Path) -> None:
    printed = run("--data-dir", str(small), "--batch-size", "16", "--epochs", "3", script="tensorflow_fashion_mnist.py")
    assert accuracies(printed)[-1] > 0.9


def test_the_scope_of_a_strategy(small: Path) -> None:
    printed = run("--data-dir", str(small), "--batch-size", "32", "--epochs", "3", script="keras_mirrored_scope.py")
    assert accuracies(printed)[-1] > 0.9


def test_a_scope_in_torch(small: Path) -> None:
    curves = [run("--data-dir", str(small), "--batch-size", "32", "--epochs", "3", "--lr", "0.01", size=size,
                  script="pytorch_mirrored_scope.py") for size in (1, 2)]
    for printed, size in zip(curves, (1, 2), strict=True):
        assert len(accuracies(printed)) == 3 and accuracies(printed)[-1] > 0.9
        assert printed.count(f"images/s on {size} ranks") == 3
    losses = [[float(found) for found in re.findall(r"test loss ([\d.]+)", printed)] for printed in curves]
    assert losses[0] == pytest.approx(losses[1], rel=0.02), "the same initial model, the same batches"
    assert len((EXAMPLES / "pytorch_mirrored_scope.py").read_text(encoding="utf-8").splitlines()) < 60


def test_too_low_an_accuracy_fails(small: Path) -> None:
    ended = launched("--data-dir", str(small), "--epochs", "1", "--lr", "0", "--minimum-accuracy", "0.99")
    assert ended.returncode == 1 and "is below 0.99" in ended.stderr


@pytest.mark.skipif(not fashion_mnist.DEBIAN.exists(), reason="the real data set is not installed")
def test_on_the_real_data() -> None:
    run("--epochs", "1", "--limit", "6400", "--batch-size", "16", "--lr", "0.005", "--minimum-accuracy", "0.7", size=4)


def test_missing_data_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist") as caught:
        fashion_mnist.find(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ValueError, match="not an IDX file"):
        (tmp_path / fashion_mnist.FILES["test"][0]).write_bytes(gzip.compress(b"garbage"))
        fashion_mnist.load(tmp_path, "test")
