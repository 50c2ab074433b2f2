"""A rank of a job that carries out trainings."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence

import torch

import hvdlite_torch as hvd
from tests.fuzzing import BEGUN, FINE, WRONG, WrongError
from tests.torch import invariants
from tests.torch.devices import prepare
from tests.torch.trainings.draws import Training, draw
from tests.torch.trainings.loop import train
from tests.torch.trainings.sides import Alone, Outside, Scoped


def main(seeds: Sequence[int], device: str = "cpu") -> None:
    """Carry out the trainings of some seeds; all ranks of a job call this with the same ones."""
    torch.set_num_threads(1)
    prepare(device)
    warnings.simplefilter("ignore")
    invariants.watch()
    hvd.init()
    gc.freeze()  # what has been imported; later collections have less to look at
    for seed in seeds:
        print(BEGUN, seed, flush=True)
        try:
            check(draw(seed, hvd.size(), device))
        except WrongError as error:
            print(WRONG, seed, error, flush=True)
        print(FINE, seed, flush=True)
    hvd.shutdown()


def check(training: Training) -> None:
    """Train on all ranks and in one process, and compare.

    Raises:
        WrongError: when they differ.
    """
    mine = train(training, Scoped(training) if training.scoped else Outside(training))
    everywhere = hvd.allgather_object(mine)
    if told := [f"ranks differ in {name}: {[other.get(name) for other in everywhere]}" for name, value in mine.items()
                if any(name not in other or not same(value, other[name]) for other in everywhere)]:
        raise WrongError("; ".join(told)[:2000].replace("\n", " "))
    if hvd.rank() != 0:
        return
    alone = train(training, Alone(training))
    if told := [f"{name}: {mine.get(name)}, alone {alone.get(name)}" for name in {**mine, **alone}
                if not (training.rounds and name.startswith("state"))  # which divides by what is rounded
            and (name not in mine or name not in alone or not close(mine[name], alone[name], training))]:
        raise WrongError("; ".join(told)[:2000].replace("\n", " "))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, but for the signs of zeros."""
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7e33), other.nan_to_num(7e33))


def close(one: torch.Tensor, other: torch.Tensor, training: Training) -> bool:
    """Return whether two tensors differ by rounding errors only."""
    relative, absolute = 1e-6, 1e-9
    if training.optimizer.startswith("LBFGS"):  # which makes rounding errors larger
        relative, absolute = 1e-5, 1e-8
    if training.dtype == "float32":
        relative, absolute = 2e-3, 1e-4
    if training.compression == "fp16":
        relative, absolute = 2e-2, 3e-3
    if training.rounds and training.compression != "fp16":
        relative, absolute = 5e-2, 2e-2
        # Centered RMSprop divides by the gradients' deviation plus 0.01, so that a rounding error of bfloat16 (2**-9 of a
        # gradient) becomes up to 100 times as large. Plain torch with the ranks' parts of the batches differs as much.
        if training.optimizer == "RMSprop":
            absolute = 0.1
    return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(
        one, other, relative, absolute, equal_nan=True)
