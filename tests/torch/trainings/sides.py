"""The three ways to carry a training out: in one process, with a `DistributedOptimizer`, in a strategy's scope."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import hvdlite_torch as hvd
from tests.torch.trainings.draws import LATER, Training
from tests.torch.trainings.models import samples
from tests.training.random_shares import draw_shares

SHARES: dict[str, Any] = {"equal": lambda size: None, "list": lambda size: list(range(1, size + 1)),
                          "random": lambda size: "auto"}
Batch = tuple[torch.Tensor, torch.Tensor, float]
"""Inputs, targets, and by what the loss is multiplied."""


class Alone:
    """One process with the global batches, in plain torch. The base of the others.

    Attributes:
        seed: of the model's first values.
        rate: learning rates are multiplied by it.
        meets_infinity: whether the infinite loss is on this rank.
        loads: whether it is this rank that loads a checkpoint, where one only does.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.seed = training.seed
        self.rate = float(training.size) if training.scaled_rate else 1.0
        self.meets_infinity = self.loads = True
        self._loader = self._data()

    def scope(self) -> Any:
        """Return what models and optimizers are made in."""
        return contextlib.nullcontext()

    def converted(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model with layers that see the global batch."""
        return model

    def wrapped(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that trains."""
        return optimizer

    def begin(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give every rank rank 0's values."""

    def state(self, optimizer: Any) -> Any:
        """Return the state of an optimizer."""
        return optimizer.state_dict()

    def joining(self, optimizers: Sequence[Any], model: torch.nn.Module) -> Any:
        """Return what the loop is in."""
        return contextlib.nullcontext()

    def accumulating(self, optimizers: Sequence[Any]) -> Any:
        """Return what a backward pass is in whose gradients are not to be reduced yet."""
        return contextlib.nullcontext()

    def synchronize(self, optimizers: Sequence[Any]) -> None:
        """Make gradients final that the script has set."""

    def weigh(self, optimizers: Sequence[Any]) -> None:
        """Give the next backward pass its weight."""

    def init_anew(self) -> None:
        """Begin a new job of the same ranks."""

    def count_ranks(self, times: int) -> list[int]:
        """Return so many times how many ranks there are, by a collective; beside a step in another thread."""
        return [self.training.size] * times

    def mean(self, loss: torch.Tensor) -> float:
        """Return the global batch's mean."""
        return float(loss.detach())

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        training = self.training
        last = training.steps * training.batches - training.batches  # the first batch that not all ranks have
        for index, (x, y) in enumerate(self._loader):
            if training.uneven and not training.scoped and index >= last:
                # a mean over all ranks, of which one has something
                yield *_part((x, y), training.seed % training.size, training.size), 1.0 / training.size
            else:
                yield x, y, 1.0

    def _data(self) -> Any:
        """Return what yields the global batches of an epoch."""
        training = self.training
        count = training.rows * training.batches * training.steps
        if training.scoped and training.uneven:
            count -= training.rows - training.left
        x, y = samples(training, count)
        match training.loader:
            case "DataLoader":
                return DataLoader(TensorDataset(x, y), training.rows)
            case "shuffled":
                return DataLoader(TensorDataset(x, y), training.rows, shuffle=True,
                                  generator=torch.Generator().manual_seed(self.seed))
            case "batch sampler":
                sampler = BatchSampler(SequentialSampler(x), training.rows, drop_last=False)
                return DataLoader(TensorDataset(x, y), batch_sampler=sampler)
            case "iterable":
                return DataLoader(_Rows(x, y), training.rows)
        return list(zip(x.split(training.rows), y.split(training.rows), strict=True))


class Outside(Alone):
    """This rank with its part of each batch, and a `DistributedOptimizer`."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.seed += 0 if training.begins == "same seed" else 1000 * hvd.rank()
        self.meets_infinity = hvd.rank() == training.seed % training.size
        self.loads = hvd.rank() == 0
        self._count = 0  # of this rank's rows in the batch

    def converted(self, model: torch.nn.Module) -> torch.nn.Module:
        return hvd.SyncBatchNorm.convert_sync_batchnorm(model)

    def wrapped(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
        training = self.training
        if training.begins == "broadcast before":
            self.begin([module], [optimizer])
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        groups = {"number": 2, "lists": [parameters[::2], parameters[1::2]], "none": None}[training.groups]
        wait_in = {"default": None, "mixed": ("backward", "step")[hvd.rank() % 2]}.get(training.wait_in, training.wait_in)
        options: dict[str, Any] = {} if training.process_set == "default" else {"process_set": hvd.global_process_set}
        optimizer = hvd.DistributedOptimizer(
            optimizer, module.named_parameters() if training.named else None, op=getattr(hvd, training.op), groups=groups,
            compression=getattr(hvd.Compression, training.compression), gradient_predivide_factor=training.predivide,
            backward_passes_per_step=training.batches if training.accumulation == "passes" else 1,
            sparse_as_dense=training.sparse_as_dense, wait_in=wait_in,
            comm_hook=hvd.comm_hooks.AllReduce() if training.hook else None, sharded=training.sharded, **options)
        if training.begins == "broadcast after":
            self.begin([module], [optimizer])
        return optimizer

    def state(self, optimizer: Any) -> Any:
        if self.training.sharded:
            optimizer.consolidate_state_dict(to=None)
        return optimizer.state_dict()

    def begin(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for module in modules:
            hvd.broadcast_parameters(module.state_dict(), 0)
        for optimizer in optimizers:
            hvd.broadcast_optimizer_state(optimizer, 0)

    @contextlib.contextmanager
    def joining(self, optimizers: Sequence[Any], model: torch.nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers if self.training.uneven else ():
                stack.enter_context(optimizer.join(*[model] * ("buffers of ranks that have joined" not in LATER)))
            yield

    def accumulating(self, optimizers: Sequence[Any]) -> Any:
        stack = contextlib.ExitStack()
        for optimizer in optimizers:
            stack.enter_context(optimizer.no_sync())
        return stack

    def init_anew(self) -> None:
        hvd.shutdown()
        hvd.init()

    def count_ranks(self, times: int) -> list[int]:
        return [int(hvd.allreduce(torch.ones(()), op=hvd.Sum, name=f"ranks {number}")) for number in range(times)]

    def synchronize(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            optimizer.synchronize()

    def weigh(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers if self.training.weighted else ():
            optimizer.set_weight(self._count)

    def mean(self, loss: torch.Tensor) -> float:
        if self.training.weighted:
            return float(hvd.allreduce(loss.detach() * self._count, op=hvd.Sum)) / self.training.rows
        return float(loss.detach()) if self.training.uneven else float(hvd.allreduce(loss.detach()))

    def batches(self) -> Iterator[Batch]:
        training = self.training
        share = 1.0 / training.size if training.op == "Sum" else 1.0
        for index, batch in enumerate(self._loader):
            lasts = hvd.rank() == training.seed % training.size
            if training.uneven and index >= (training.steps - 1) * training.batches and not lasts:
                return
            if training.weighted:
                counts = _counts(training, index)
                begin, self._count = sum(counts[:hvd.rank()]), counts[hvd.rank()]
                begin = min(begin, training.rows - 1)  # of the row of a rank that has none
                x, y = (column[begin:begin + max(1, self._count)] for column in batch)
                yield x, y, 1.0
            else:
                yield *_part(batch, hvd.rank(), training.size), share


class Scoped(Outside):
    """This rank in a strategy's scope, with global batches."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.rate = 1.0
        self.seed = training.seed + 1000 * hvd.rank()
        self._loader = self._data()
        self._strategy = hvd.MirroredStrategy(
            scale_learning_rate=training.scaled_rate, sync_batch_norm=training.model == "sync batch norm",
            backward_passes_per_step=training.batches if training.accumulation == "passes" else 1,
            compression=getattr(hvd.Compression, training.compression), shares=SHARES[training.shares](training.size))
        if training.shares == "random":
            draw_shares(self._strategy._shares, training.seed)
        self._batches = self._strategy.distribute(self._loader)

    def scope(self) -> Any:
        return self._strategy.scope()

    def converted(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def wrapped(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
        return optimizer

    def begin(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._strategy.mirror()

    def joining(self, optimizers: Sequence[Any], model: torch.nn.Module) -> Any:
        return contextlib.nullcontext()

    def mean(self, loss: torch.Tensor) -> float:
        return float(self._strategy.reduce("MEAN", loss.detach()))

    def batches(self) -> Iterator[Batch]:
        return ((x, y, 1.0) for x, y in self._batches)


class _Rows(IterableDataset[Any]):
    def __init__(self, *columns: torch.Tensor) -> None:
        self._columns = columns

    def __iter__(self) -> Iterator[Any]:
        return zip(*self._columns, strict=True)


def _counts(training: Training, index: int) -> list[int]:
    """Return how many rows of a batch each rank has.

    The rank that may meet infinity has some, others perhaps none; they compute with one whose weight is 0, but not where all
    ranks' rows count in a normalisation.
    """
    draw = random.Random(f"{training.seed} {index}")
    some = training.model == "sync batch norm"
    counts = [int(some or rank == training.seed % training.size) for rank in range(training.size)]
    for _ in range(training.rows - sum(counts)):
        counts[draw.randrange(training.size) if index % 3 else training.seed % training.size] += 1
    return counts


def _part(batch: tuple[torch.Tensor, torch.Tensor], rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (column.chunk(size)[rank] for column in batch)
    return x, y
