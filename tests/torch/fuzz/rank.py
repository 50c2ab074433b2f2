"""Carrying programs out with hvdlite, on one rank."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any

import torch

import hvdlite_torch as hvd
from tests.fuzzing import BEGUN, FINE, WrongError
from tests.torch import invariants
from tests.torch.devices import prepare
from tests.torch.fuzz.program import Change, Program, Step, Turn, draw
from tests.torch.fuzz.replica import Replica, Simulation, differences, plain_optimizer


class Rank(Replica):
    """Like `Replica`, with wrapped optimizers.

    Args:
        sets: process sets that are registered, by their ranks; they are used again by later programs.
    """

    def __init__(self, program: Program, rank: int, sets: dict[tuple[int, ...], Any]) -> None:
        self._sets = sets
        for drawn in program.optimizers:
            if drawn.ranks is not None and drawn.ranks not in sets:
                sets[drawn.ranks] = hvd.global_process_set if len(drawn.ranks) == program.size else \
                    hvd.add_process_set(list(drawn.ranks))
        super().__init__(program, rank)
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def optimizer(self, index: int) -> Any:
        drawn = self.program.optimizers[index]
        gc.collect()  # whatever optimizer there was must not reduce any more
        groups: Any = drawn.groups
        if isinstance(groups, tuple):
            groups = [[self.model[member] for member in group] for group in groups]
        plain = plain_optimizer(drawn.kind, [self.model[member] for member in self.members[index]])
        return hvd.DistributedOptimizer(
            plain, op=getattr(hvd, drawn.op), backward_passes_per_step=drawn.passes, groups=groups,
            sparse_as_dense=drawn.sparse_as_dense, gradient_predivide_factor=drawn.predivide,
            wait_in=drawn.wait_in[self.rank],
            process_set=hvd.global_process_set if drawn.ranks is None else self._sets[drawn.ranks])

    def change(self, change: Change) -> None:
        if change.kind == "cast":
            self._kept.clear()  # torch casts them, as they are gradients still
        super().change(change)

    def clear(self, how: str) -> None:
        if how in ("zeros", "keep"):
            self._kept.clear()  # torch changes them
        super().clear(how)

    def run(self, step: Step, number: int) -> None:
        """Carry out a step in which this rank takes part."""
        turn = step.turns[self.rank]
        assert turn is not None
        for change in step.changes:
            self.change(change)
        self.clear(step.clears)
        if turn.early and step.metric:
            self._measure(number)
        self._compute(turn, number)
        if step.synchronizes:
            for optimizer in self.optimizers:
                optimizer.synchronize()
        if step.metric and not turn.early:
            self._measure(number)
        if step.clips:
            self.clip()
        if step.applies:
            self.apply()
        if turn.keeps:
            gradients = [parameter.grad for parameter in self.model if parameter.grad is not None]
            self._kept += [(gradient, gradient.clone()) for gradient in gradients]
        for gradient, values in self._kept:
            if not torch.equal(gradient.to_dense(), values.to_dense()):
                raise WrongError(f"step {number}: a gradient of shape {tuple(gradient.shape)} that was kept has changed")

    def _compute(self, turn: Turn, number: int) -> None:
        for optimizer in self.optimizers if self.program.weighted else ():
            optimizer.set_weight(0)
        for backward in turn.backwards:
            with contextlib.ExitStack() as suspended:
                for part in backward.accumulates:
                    suspended.enter_context(self.optimizers[part].no_sync())
                for part, optimizer in enumerate(self.optimizers):
                    if backward.weight is not None and self.computes(part, backward):
                        optimizer.set_weight(backward.weight)
                self.loss(backward, number).backward()

    def _measure(self, number: int) -> None:
        found = float(hvd.allreduce(torch.tensor(float(number + self.rank))))
        wanted = number + (self.program.size - 1) / 2
        if abs(found - wanted) > 1e-3:
            raise WrongError(f"step {number}: the metric is {found}, not {wanted}")

    def check(self, other: Replica, worst: list[torch.dtype], number: int) -> None:
        """Compare with the reference's replica of this rank."""
        for what, own, theirs in (("parameter", [*self.model], [*other.model]), ("gradient", *(
                [parameter.grad for parameter in replica.model] for replica in (self, other)))):
            if told := differences(own, theirs, worst):
                raise WrongError(f"step {number}, rank {self.rank}: {what} {'; '.join(told)}")

    def check_replicas(self) -> None:
        """Compare what ranks share, bit by bit."""
        for part, (drawn, members) in enumerate(zip(self.program.optimizers, self.members, strict=True)):
            if drawn.ranks is not None and self.rank not in drawn.ranks:
                continue
            shared = hvd.global_process_set if drawn.ranks is None else self._sets[drawn.ranks]
            hvd.check_replicas({f"{part}.{member}": self.model[member].detach() for member in members}, shared)


def run(program: Program, sets: dict[tuple[int, ...], Any]) -> None:
    """Carry out a program on this rank, and compare it with the reference after every step.

    Raises:
        WrongError: when it differs.
        ReplicaMismatchError: when ranks differ.
    """
    own = Rank(program, hvd.rank(), sets)
    reference = Simulation(program)
    worst = [parameter.dtype for parameter in own.model]
    with contextlib.ExitStack() as joining:
        for number, step in enumerate(program.steps):
            if program.joins is not None and number == program.joins[0]:
                joining.enter_context(own.optimizers[0].join())
            takes_part = step.turns[own.rank] is not None
            if takes_part:
                own.run(step, number)
            else:
                for change in step.changes:
                    own.change(change)
            reference.run(number)
            if program.joins is not None and number + 1 == program.joins[1]:
                joining.close()
            elif not takes_part:
                continue
            worst = [torch.bfloat16 if torch.bfloat16 in (before, parameter.dtype) else parameter.dtype
                     for before, parameter in zip(worst, own.model, strict=True)]
            own.check(reference.replicas[own.rank], worst, number)
    own.check_replicas()


def main(seeds: Sequence[int], features: Sequence[str], device: str = "cpu") -> None:
    """Run the programs of some seeds; every rank of a job calls this with the same ones."""
    torch.set_num_threads(1)
    prepare(device)
    invariants.watch()
    hvd.init()
    sets: dict[tuple[int, ...], Any] = {}
    for seed in seeds:
        print(BEGUN, seed, flush=True)
        run(draw(seed, hvd.size(), features, device), sets)
        print(FINE, seed, flush=True)
    hvd.shutdown()
