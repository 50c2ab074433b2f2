"""The example runs, learns, and finds its data; on small data where the real set is not installed."""

from __future__ import annotations

import ast
import functools
import gzip
import importlib
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import write_idx
from tests.tf.support import BACKENDS, ENVIRONMENT, imported
from tests.worlds import TORCH, processes

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.slow
sys.path.insert(0, str(EXAMPLES))

import fashion_mnist  # noqa: E402


@pytest.fixture
def clothes(small: Path) -> Path:
    """Return a directory with some of the real images, if they are on this machine, else with those of `small`."""
    if fashion_mnist.DEBIAN.exists():
        for name, values in first_images().items():
            write_idx(small / name, values)
    return small


@functools.cache
def first_images() -> dict[str, np.ndarray]:
    """Return 2,000 of the real images to train on and 500 to test, with their labels, by the names of their files."""
    return {name: values[:count].copy() for part, count in (("train", 2000), ("test", 500))
            for name, values in zip(fashion_mnist.FILES[part], fashion_mnist.load(fashion_mnist.DEBIAN, part), strict=True)}


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


@pytest.mark.parametrize("framework", ["pytorch", "keras"])
def test_the_least_that_is_needed(clothes: Path, framework: str) -> None:
    printed = run(str(clothes), script=f"{framework}_minimal.py")
    assert accuracies(printed)[-1] > 0.5 and printed.endswith("on 2 ranks\n")


def test_keras_checkpoint_and_resume(small: Path, tmp_path: Path) -> None:
    common = ("--data-dir", str(small), "--batch-size", "16", "--checkpoint", str(tmp_path / "model.keras"),
              "--steps-per-execution", "2")  # a graph of ten takes longer to make than to run
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


def test_the_synthetic_benchmark() -> None:
    printed = run("--model", "resnet14", "--image-size", "32", "--batch-size", "2", "--num-warmup-batches", "1",
                  "--num-batches-per-iter", "2", "--num-iters", "3", "--fp16-allreduce",
                  script="pytorch_synthetic_benchmark.py")
    rounds = [float(found) for found in re.findall(r"^round \d: ([\d.]+) images/s", printed, re.MULTILINE)]
    ranks = [float(found) for found in re.findall(r"^rank \d: ([\d.]+) \+-", printed, re.MULTILINE)]
    total = float(re.findall(r"^in all: ([\d.]+) \+-", printed, re.MULTILINE)[0])
    assert len(rounds) == 3 and len(ranks) == 2 and min(ranks) > 0
    assert total == pytest.approx(sum(ranks), abs=0.2) == pytest.approx(sum(rounds) / 3, abs=0.2)


def test_a_model_that_does_not_exist_is_named() -> None:
    with pytest.raises(AssertionError, match=r"--model resnet5: .*torchvision"):
        run("--model", "resnet5", size=1, script="pytorch_synthetic_benchmark.py")


def test_the_character_gpt() -> None:
    printed = run("--steps", "12", "--batch-size", "4", "--passes", "2", "--warmup-steps", "3", "--report-every", "6",
                  "--generate", "30", script="pytorch_char_gpt.py")
    early, late = (float(found) for found in re.findall(r"validation loss ([\d.]+)", printed))
    assert late < early and late < 4.2, "a model that has learned nothing has 4.7"
    assert len(printed.partition("it writes: The ")[2].strip()) > 5


def test_fine_tuning_that_goes_on_is_the_same_as_in_one_run(clothes: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = importlib.import_module("pytorch_fashion_mnist").Net().state_dict()
    torch.save({"model": base}, tmp_path / "base.pt")
    model = importlib.import_module("pytorch_fine_tuning").build(str(tmp_path / "base.pt"))
    assert {name for name, each in model.named_parameters() if each.requires_grad} == {
        f"head.{layer}.{kind}" for layer in (1, 2, 4) for kind in ("weight", "bias")}

    def tuned(name: str, epochs: int) -> tuple[str, dict]:
        printed = run("--data-dir", str(clothes), "--base", str(tmp_path / "base.pt"), "--checkpoint", str(tmp_path / name),
                      "--frozen-epochs", "1", "--epochs", str(epochs), "--limit", "1000", "--batch-size", "16",
                      script="pytorch_fine_tuning.py")
        return printed, torch.load(tmp_path / name)

    _, frozen = tuned("parts.pt", 1)
    assert torch.equal(frozen["model"]["backbone.0.weight"], base["conv1.weight"])
    tuned("parts.pt", 2)
    printed, parts = tuned("parts.pt", 3)
    assert printed.startswith("epoch 3, all layers:") and accuracies(printed)[-1] > 0.6
    assert not torch.equal(parts["model"]["backbone.0.weight"], base["conv1.weight"])
    printed, whole = tuned("whole.pt", 3)
    assert printed.count("epoch ") == 3
    assert len(whole["optimizer"]["param_groups"]) == 2
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


def test_inference_on_three_ranks_is_that_of_one(clothes: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"model": importlib.import_module("pytorch_fashion_mnist").Net().state_dict()}, tmp_path / "model.pt")

    def results(size: int) -> np.ndarray:
        run("--data-dir", str(clothes), "--checkpoint", str(tmp_path / "model.pt"), "--output", str(tmp_path / "out.npy"),
            "--limit", "200", "--batch-size", "30", size=size, script="pytorch_inference.py")
        return np.load(tmp_path / "out.npy")

    alone, together = results(1), results(3)
    assert together.shape == (200, 2) and len(set(alone[:, 1])) > 100
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def keras_loop(directory: Path, backend: str, *arguments: str) -> list[float]:
    """Return the accuracies that keras_custom_loop.py prints."""
    for needed in ("tensorflow", backend):  # this process imports neither
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    ended = processes(2, EXAMPLES / "keras_custom_loop.py", "--data-dir", str(directory), *arguments, timeout=150,
                      imported=imported(backend), environment={**ENVIRONMENT, "KERAS_BACKEND": backend})
    return accuracies(ended[0].stdout)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_of_ones_own_on_each_backend_of_keras(small: Path, backend: str) -> None:
    found = keras_loop(small, backend, "--epochs", "2", "--batch-size", "16")
    assert len(found) == 2 and found[-1] > 0.55, "chance is 0.1"


def test_a_loop_of_ones_own_ends_on_all_ranks_when_nothing_is_learned(small: Path) -> None:
    assert len(keras_loop(small, "tensorflow", "--lr", "0", "--patience", "2", "--epochs", "9")) == 3


def test_the_notebook(clothes: Path) -> None:
    """It has the outputs of a run, and runs."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("torch")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    stored = [[output.output_type for output in cell.outputs] for cell in code]
    assert str(fashion_mnist.DEBIAN) in code[0].source
    code[0].source = code[0].source.replace(str(fashion_mnist.DEBIAN), str(clothes))
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3",
                            resources={"metadata": {"path": str(clothes)}}).execute()  # in any folder
    for cell in code:  # a busy machine adds warnings
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    assert [[output.output_type for output in cell.outputs] for cell in code] == stored == [
        [], [], ["execute_result"], ["stream"]]
    (first, losses), (second, same) = ast.literal_eval(code[2].outputs[0].data["text/plain"])
    assert (first, second) == (0, 1) and losses == same and losses[-1] < losses[0]
    assert float(code[3].outputs[0].text.split()[-1]) > 0.55, "chance is 0.1"


def test_too_low_an_accuracy_fails(small: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 ended with 1.*is below 0\.99"):
        run("--data-dir", str(small), "--epochs", "1", "--lr", "0", "--minimum-accuracy", "0.99")


@pytest.mark.long
@pytest.mark.skipif(not fashion_mnist.DEBIAN.exists(), reason="the real data set is not installed")
def test_on_the_real_data() -> None:
    """As `make demo`; some of the real images, with another example: `test_inference_on_three_ranks_is_that_of_one`."""
    run("--epochs", "1", "--limit", "3200", "--batch-size", "16", "--lr", "0.005", "--minimum-accuracy", "0.6", size=2)


def test_the_index_has_every_file_and_no_other() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\[`([^`]+)`\]\(([^)]+)\)", text)
    assert all(name == link for name, link in named)
    assert sorted(name for name, _ in named) == sorted(
        path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md")
    commands = re.findall(r"<br>`([^`]+)`", text)
    assert len(commands) > 10 and all((ROOT / word).exists() for command in commands for word in command.split()
                                      if word.startswith("examples/"))


def test_missing_data_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist") as caught:
        fashion_mnist.find(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ValueError, match="not an IDX file"):
        (tmp_path / fashion_mnist.FILES["test"][0]).write_bytes(gzip.compress(b"garbage"))
        fashion_mnist.load(tmp_path, "test")
