"""The examples for torch.distributed run with the backend "hvdlite", and learn."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from char_gpt import Text

from tests.house.programs.torch_example import EXAMPLES, run_example
from tests.worlds import HVDRUN, TORCH, clean_environment, free_port, processes

pytestmark = pytest.mark.slow


def run(script: str, *arguments: str, size: int = 2) -> str:
    """Run an example; return what rank 0 prints, and the others do not."""
    ended = processes(size, run_example, script, free_port(), *arguments, imported=TORCH)
    assert not any(rank.stdout for rank in ended[1:]), "only rank 0 prints"
    return ended[0].stdout


def images(directory: Path) -> tuple[str, ...]:
    return "--data-dir", str(directory), "--batch-size", "16", "--epochs", "2"


def accuracy(text: str) -> float:
    return float(re.findall(r"test accuracy ([\d.]+)", text)[-1])


def loss(text: str) -> float:
    return float(re.findall(r"(?:validation|training) loss ([\d.]+)", text)[-1])


UNTRAINED = math.log(Text().characters)
"""The loss of a model that holds all characters for equally likely."""


@pytest.mark.parametrize("optimizer", [(), ("--zero",)], ids=["adam", "zero"])
def test_ddp(small: Path, tmp_path: Path, optimizer: tuple[str, ...]) -> None:
    file = tmp_path / "model.pt"
    printed = run("ddp_fashion_mnist.py", *images(small), "--checkpoint", str(file), *optimizer)
    assert accuracy(printed) > 0.9 and "on 2 ranks" in printed
    moments = torch.load(file)["optimizer"]["state"]
    assert sorted(moments) == list(range(6)), "the state of all parameters, whichever rank had it"


@pytest.mark.long
def test_under_hvdrun(small: Path) -> None:
    """What hvdrun does for torch.distributed, and the example alone: test_launchers.py, `test_ddp`."""
    ended = subprocess.run([*HVDRUN, "-np", "2", sys.executable, str(EXAMPLES / "ddp_fashion_mnist.py"), *images(small)],
                           capture_output=True, text=True, timeout=150, check=False,
                           env={**clean_environment(), "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    assert accuracy(ended.stdout) > 0.9


def test_fsdp2_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    options = ("--batch-size", "4", "--checkpoint", str(tmp_path / "checkpoints"))
    assert loss(run("fsdp2_char_gpt.py", "--steps", "8", *options)) < UNTRAINED - 0.5
    again = run("fsdp2_char_gpt.py", "--steps", "10", *options)
    assert again.startswith("goes on after step 8\nstep 10:") and loss(again) < UNTRAINED - 0.5


def test_tensor_parallel_and_fsdp2_on_a_mesh() -> None:
    assert loss(run("tensor_parallel_char_gpt.py", "--steps", "6", "--batch-size", "4", size=4)) < UNTRAINED - 0.5


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_pipelines(schedule: str) -> None:
    printed = run("pipeline_char_gpt.py", "--steps", "8", "--batch-size", "8", "--schedule", schedule)
    assert loss(printed) < UNTRAINED - 0.5 and "on 2 ranks" in printed


@pytest.mark.parametrize(("framework", "arguments"), [("accelerate", ()), ("lightning", ("--devices", "2"))])
def test_fashion_mnist_with(framework: str, arguments: tuple[str, ...], small: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    printed = run(f"{framework}_fashion_mnist.py", *images(small), *arguments)
    assert accuracy(printed) > 0.9 and "on 2 ranks" in printed


def test_hugging_faces_trainer() -> None:
    for needed in ("transformers", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    printed = run("transformers_char_gpt.py", "--steps", "8", "--batch-size", "4")
    assert "step 8:" in printed and "on 2 ranks" in printed and loss(printed) < UNTRAINED - 0.5
