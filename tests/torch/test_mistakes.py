"""Mistakes of a script that end with no error are named when it leaves the job, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.torch.programs import mistakes as programs
from tests.worlds import TORCH, Program, processes


def warnings(program: Program, *arguments: str) -> list[str]:
    """Return each rank's warnings."""
    return ["\n".join(line for line in rank.stderr.splitlines() if "WARNING" in line)
            for rank in processes(2, program, *arguments, imported=TORCH)]


@pytest.mark.parametrize(("program", "told"), [
    (programs.not_wrapped, "no gradient was reduced: each of the 2 ranks has trained a model of its own. Wrap the"),
    (programs.of_another_model, "SGD (of 2 parameters, first 'weight') has made 3 steps and never got a"),
    (programs.beside_ddp, "the model is in a DistributedDataParallel, which averages its gradients too"),
])
def test_a_mistake_is_named_by_the_first_rank(program: Program, told: str, tmp_path: Path) -> None:
    first, second = warnings(program, *([str(tmp_path)] if program is programs.beside_ddp else []))
    assert told in first and first.count("WARNING") == 1 and second == ""


@pytest.mark.parametrize("program", [
    programs.right, programs.evaluated, programs.averaged_now_and_then, programs.reduced_by_hand,
    programs.reduced_in_a_closure, programs.in_memory_of_another, programs.alone])
def test_what_may_be_meant_is_not_named(program: Program) -> None:
    assert warnings(program) == ["", ""]


def test_different_models_are_an_error() -> None:
    processes(2, programs.different_models, imported=TORCH)
