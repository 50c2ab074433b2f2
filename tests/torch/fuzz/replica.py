"""Carrying a program out in plain torch: a rank's model and optimizers, and all ranks' in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tests.torch.fuzz.program import Backward, Change, Optimizer, Parameter, Program, Step

LEARNING_RATE = 0.05
LONGEST = 0.5
"""To what norm gradients are clipped."""


def made(parameter: Parameter, seed: int, device: str) -> torch.nn.Parameter:
    """Return a parameter with values that follow from the seed."""
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    values = values.to(device, getattr(torch, parameter.dtype))
    if parameter.layout == "channels_last":
        values = values.to(memory_format=torch.channels_last)
    elif parameter.layout == "transposed":
        values = values.t().contiguous().t()
    return torch.nn.Parameter(values, requires_grad=not parameter.frozen)


def plain_optimizer(kind: str, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer of torch's. With foreach, the default on GPUs, parameters could not change their dtype."""
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=LEARNING_RATE, foreach=False)
    if kind == "sparse_adam":
        return torch.optim.SparseAdam(list(parameters), lr=LEARNING_RATE)
    more = {"momentum": 0.9, "weight_decay": 0.01} if kind == "momentum" else {}
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, foreach=False, **more)


class Replica:
    """One rank's model and optimizers.

    Attributes:
        model: all parameters of the program, in its order.
        members: by optimizer, the indices of its parameters.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.model = torch.nn.ParameterList(made(parameter, 1000 * program.seed + index, program.device)
                                            for index, parameter in enumerate(program.parameters))
        self.members = [list(optimizer.members) for optimizer in program.optimizers]
        self.optimizers = [self.optimizer(index) for index in range(len(program.optimizers))]

    def optimizer(self, index: int) -> Any:
        """Return a new optimizer for its members."""
        return plain_optimizer(self.program.optimizers[index].kind, [self.model[member] for member in self.members[index]])

    def change(self, change: Change) -> None:
        """Change the model."""
        match change.kind:
            case "freeze" | "thaw":
                self.model[change.index].requires_grad_(change.kind == "thaw")
            case "cast":
                self.model.to(getattr(torch, str(change.to)))
            case "add":
                part = int(change.to)
                self.optimizers[part].add_param_group({"params": [self.model[change.index]]})
                self.members[part].append(change.index)
            case "anew":
                self.optimizers[change.index] = None
                self.optimizers[change.index] = self.optimizer(change.index)

    def clear(self, how: str) -> None:
        """Clear gradients."""
        if how in ("none", "zeros"):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=how == "none")
        elif how == "model":
            self.model.zero_grad()
        elif how == "hand":
            for parameter in self.model:
                parameter.grad = None

    def loss(self, backward: Backward, number: int) -> torch.Tensor:
        """Return a loss whose gradients depend on the parameters, the rank, the step and the pass."""
        total = torch.zeros((), dtype=torch.float64, device=self.program.device)
        for index in backward.uses:
            parameter = self.model[index]
            if self.program.parameters[index].sparse:
                rows = torch.tensor([(number + index) % len(parameter), (3 * self.rank + number) % len(parameter), 0],
                                    device=self.program.device)
                parameter = torch.nn.functional.embedding(rows, parameter, sparse=True)
            total = total + ((parameter * backward.scale + index).sin() * (1 + self.rank)).sum().double()
        return total

    def clip(self) -> None:
        """Clip the norm of all gradients, optimizer by optimizer, whatever their layouts."""
        for members in self.members:
            gradients = [gradient for member in members if (gradient := self.model[member].grad) is not None]
            norm = sum(float(gradient.to_dense().double().square().sum()) for gradient in gradients) ** 0.5
            if norm > LONGEST:
                for gradient in gradients:
                    gradient.mul_(LONGEST / norm)

    def computes(self, part: int, backward: Backward) -> bool:
        """Return whether a pass computes gradients of an optimizer."""
        return any(index in self.members[part] and self.model[index].requires_grad for index in backward.uses)

    def apply(self) -> None:
        """Let the optimizers step."""
        for optimizer in self.optimizers:
            optimizer.step()


class Simulation:
    """All ranks of a program, one after the other.

    Presence: a rank contributes a parameter's gradient when a backward pass has touched it since the last round, or when it
    is another tensor than the one that was reduced last.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.replicas = [Replica(program, rank) for rank in range(program.size)]
        self._reduced: list[set[int]] = [set() for _ in self.replicas]  # by rank: whose gradient is that of the last round
        self._touched: list[set[int]] = [set() for _ in self.replicas]
        self._admitted: list[set[int]] = [set() for _ in program.optimizers]  # members that have been trainable in a round

    def run(self, number: int) -> None:
        """Carry out a step."""
        step = self._program.steps[number]
        active = [rank for rank, turn in enumerate(step.turns) if turn is not None]
        for rank, replica in enumerate(self.replicas):
            self._prepare(rank, replica, step, active=rank in active)
        for rank in active:
            turn = step.turns[rank]
            for backward in turn.backwards if turn is not None else ():
                weight = 1 if backward.weight is None else backward.weight
                (self.replicas[rank].loss(backward, number) * weight).backward()
                self._touched[rank].update(backward.uses)
        for part, optimizer in enumerate(self._program.optimizers):
            members = [rank for rank in active if optimizer.ranks is None or rank in optimizer.ranks]
            divisor = self._program.size if optimizer.ranks is None else len(optimizer.ranks)
            weights = [self._weights(part, rank, step) for rank in members]
            if any(weights):  # k sum(n g) / sum(n), for the k passes of the rank with most
                divisor = sum(map(sum, weights)) / max(map(len, weights))
            self._reduce(part, optimizer, members, divisor or 1.0)
            if not divisor and step.applies:  # nobody has counted anything, so the step changes nothing
                for rank, index in itertools.product(members, self.replicas[0].members[part]):
                    self.replicas[rank].model[index].grad = None
        for rank in active:
            if step.clips:
                self.replicas[rank].clip()
            if step.applies:
                self.replicas[rank].apply()
            self._touched[rank].clear()
        if self._program.joins is not None and number + 1 == self._program.joins[1]:
            self._take_over(active[0])

    def _weights(self, part: int, rank: int, step: Step) -> list[int]:
        """Return the weights of a rank's passes that compute gradients of an optimizer."""
        turn = step.turns[rank]
        return [each.weight for each in (turn.backwards if turn is not None else ())
                if each.weight is not None and self.replicas[rank].computes(part, each)]

    def _prepare(self, rank: int, replica: Replica, step: Step, *, active: bool) -> None:
        for change in step.changes:
            replica.change(change)
            if change.kind == "anew":
                self._reduced[rank] -= set(replica.members[change.index])
                self._admitted[change.index].clear()
        if active:
            replica.clear(step.clears)
            self._reduced[rank] = {index for index in self._reduced[rank] if replica.model[index].grad is not None}

    def _reduce(self, part: int, optimizer: Optimizer, ranks: Sequence[int], divisor: float) -> None:
        replica = self.replicas[0]
        self._admitted[part].update(index for index in replica.members[part] if replica.model[index].requires_grad)
        for index in sorted(self._admitted[part]):
            present = [self.replicas[rank].model[index].grad for rank in ranks if self._is_present(rank, index)]
            if not present:
                continue
            result = mean(present, divisor if optimizer.op == "Average" else 1)
            for rank in ranks:
                self.replicas[rank].model[index].grad = result.clone()
                self._reduced[rank].add(index)

    def _is_present(self, rank: int, index: int) -> bool:
        return self.replicas[rank].model[index].grad is not None and (
            index in self._touched[rank] or index not in self._reduced[rank])

    def _take_over(self, root: int) -> None:
        """Give every rank the parameters and the state of one."""
        for rank, replica in enumerate(self.replicas):
            for own, taken in zip(replica.model, self.replicas[root].model, strict=True):
                own.data.copy_(taken.data)
            if rank != root:
                replica.optimizers[0].load_state_dict(copy.deepcopy(self.replicas[root].optimizers[0].state_dict()))


def mean(gradients: Sequence[torch.Tensor], divisor: float) -> torch.Tensor:
    """Return the sum of gradients, in the order of the ranks, over a divisor; 16-bit ones are summed in float32."""
    if any(gradient.layout is not torch.strided for gradient in gradients):
        total = sum(gradients[1:], gradients[0]).coalesce()
        return total / divisor
    dtype = gradients[0].dtype
    wide = [gradient.float() if dtype is torch.bfloat16 else gradient.clone() for gradient in gradients]
    for gradient in wide[1:]:
        wide[0] += gradient
    return (wide[0] / divisor).to(dtype)


def differences(own: Iterable[torch.Tensor | None], other: Iterable[torch.Tensor | None],
                worst: Sequence[torch.dtype]) -> list[str]:
    """Return in what two replicas' parameters or gradients differ by more than rounding.

    Args:
        worst: the least exact dtype that each parameter has had.
    """
    told = []
    for index, (one, two, dtype) in enumerate(zip(own, other, worst, strict=True)):
        if (one is None) != (two is None):
            told.append(f"{index}: {'None' if one is None else 'a tensor'} where the reference has "
                        f"{'None' if two is None else 'a tensor'}")
        if one is None or two is None:
            continue
        one, two = (each.detach().to_dense() if each.layout is not torch.strided else each.detach() for each in (one, two))
        tolerance = absolute = 3e-2 if dtype is torch.bfloat16 else 1e-3
        if one.is_cuda and dtype is torch.bfloat16 and one.numel():  # NCCL rounds after each addition
            absolute *= float(two.abs().max()) + 1
        if one.dtype is not two.dtype or not torch.allclose(one.double(), two.double(), rtol=tolerance, atol=absolute):
            error = (one.double() - two.double()).abs().max() if one.dtype is two.dtype else f"{one.dtype} for {two.dtype}"
            told.append(f"{index} {tuple(one.shape)}: off by {error}: {one.reshape(-1)[:3].tolist()}, the reference "
                        f"{two.reshape(-1)[:3].tolist()}")
    return told
