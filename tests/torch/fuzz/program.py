"""Random training programs: what is trained, and what each rank does in each step. No torch, no ranks.

Every draw has a random stream of its own, named after what is drawn, so a feature that is turned off leaves the other
draws as they were. What may be drawn is what `DistributedOptimizer` promises to work (training/gradients/reducer.py):

- All ranks make the same number of rounds between two steps. Two backward passes over the same gradients are one round only
  with `no_sync` or `backward_passes_per_step`.
- A rank that has no backward pass takes part in `synchronize()` or `step()`. So where gradients are changed between
  `backward()` and `step()`, or the step is skipped, either every rank has enqueued all of its gradients by then, or all
  ranks call `synchronize()`.
- Waits in `backward()` may close a circle (after half a second that is found and resolved) only in programs with `circles`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

FEATURES = (
    "missing",  # ranks have no gradient for some parameters
    "absent",  # ranks have no backward pass in a step, or fewer than others
    "no_sync", "passes", "clears", "skips", "dtypes", "casts", "layouts", "freezing", "several", "separate", "circles",
    "metrics", "clips", "joins", "sets", "groups", "sparse", "keeps", "adding", "anew", "wait_in", "sums", "disjoint",
    "weights")
SHAPES = ((1,), (3,), (17, 2), (64, 9), (5000,), (), (0, 3), (4, 3, 5, 5))
ROWS = 12
"""Of a sparse embedding."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter, whose values follow from the seed and its index.

    Attributes:
        layout: "plain", "transposed", or "channels_last" (of four dimensions).
        sparse: whether it is an embedding with sparse gradients.
        frozen: whether it begins without `requires_grad`.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "plain"
    sparse: bool = False
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One optimizer, and how it is wrapped.

    Attributes:
        members: indices of its parameters; others may be added later.
        kind: "sgd", "momentum" (with weight decay), "adam" or "sparse_adam".
        groups: as for `DistributedOptimizer`: a number, or indices of parameters.
        ranks: its process set; None for all.
        wait_in: for each rank.
    """

    members: tuple[int, ...]
    kind: str
    op: str
    passes: int
    groups: int | tuple[tuple[int, ...], ...] | None
    sparse_as_dense: bool
    ranks: tuple[int, ...] | None
    wait_in: tuple[str, ...]
    predivide: float


@dataclasses.dataclass(frozen=True)
class Change:
    """What all ranks do to the model before a step: "freeze", "thaw", "cast", "add" or "anew"."""

    kind: str
    index: int = 0  # of the parameter; for "anew" of the optimizer
    to: int | str = 0  # "add": the optimizer; "cast": the dtype


@dataclasses.dataclass(frozen=True)
class Backward:
    """One backward pass.

    Attributes:
        uses: indices of the parameters in its loss.
        accumulates: whether it is inside `no_sync` of these optimizers; empty: it counts.
        weight: of this rank; None in programs without weights.
    """

    uses: tuple[int, ...]
    scale: float
    accumulates: tuple[int, ...] = ()
    weight: int | None = None


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one rank does in a step.

    Attributes:
        keeps: whether it keeps its gradients, which must never change.
        early: whether it computes the metric before its backward passes, not after.
    """

    backwards: tuple[Backward, ...]
    keeps: bool = False
    early: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """What happens in one step, in this order.

    Attributes:
        changes: to the model.
        clears: how gradients are cleared: "none", "zeros", "model", "hand" or "keep".
        turns: each rank's backward passes; None for a rank that has joined.
        synchronizes: whether all ranks call `synchronize()` then.
        metric: whether all ranks call a collective then.
        clips: whether gradients are clipped then.
        applies: whether the optimizers step; else the step is skipped.
    """

    changes: tuple[Change, ...]
    clears: str
    turns: tuple[Turn | None, ...]
    synchronizes: bool
    metric: bool
    clips: bool
    applies: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program on a device, "cpu" or "cuda". Steps `joins[0]`..`joins[1]` are in `optimizer.join()`.

    Attributes:
        weighted: whether ranks weigh their passes; those without a pass have weight 0.
    """

    seed: int
    size: int
    parameters: tuple[Parameter, ...]
    optimizers: tuple[Optimizer, ...]
    steps: tuple[Step, ...]
    joins: tuple[int, int] | None
    weighted: bool = False
    device: str = "cpu"

    def told(self) -> str:
        """Return the program as lines for people."""
        lines = [f"seed {self.seed} on {self.size} ranks, joins {self.joins}"]
        lines += [f"  parameter {index}: {parameter}" for index, parameter in enumerate(self.parameters)]
        lines += [f"  optimizer {index}: {optimizer}" for index, optimizer in enumerate(self.optimizers)]
        for number, step in enumerate(self.steps):
            what = [f"{name}" for name in ("synchronizes", "metric", "clips") if getattr(step, name)]
            lines.append(f"  step {number}: {', '.join([*map(str, step.changes), f'clears {step.clears}', *what])}"
                         f"{'' if step.applies else ', SKIPPED'}")
            lines += [f"    rank {rank}: {turn}" for rank, turn in enumerate(step.turns)]
        return "\n".join(lines)


def draw(seed: int, size: int, features: Sequence[str] = FEATURES, device: str = "cpu") -> Program:
    """Return the program of a seed."""
    program = dataclasses.replace(_Draw(seed, size, frozenset(features)).program(), device=device)
    if device == "cuda" and program.joins is not None:  # nobody looks for zeros there, which are multiplied to clip
        program = dataclasses.replace(program, steps=tuple(dataclasses.replace(step, clips=False) for step in program.steps))
    return program


class _Draw:
    """Draws a program; its fields are the state of the model while the steps are drawn."""

    def __init__(self, seed: int, size: int, features: frozenset[str]) -> None:
        self._seed, self._size, self._features = seed, size, features
        self._circles = self._has("circles", 0.12)

    def _stream(self, *what: object) -> random.Random:
        return random.Random(f"{self._seed}/{'/'.join(map(str, what))}")

    def _has(self, feature: str, chance: float, *where: object) -> bool:
        """Return whether a feature is drawn here, as far as it is wanted at all."""
        return feature in self._features and self._stream(feature, *where).random() < chance

    def program(self) -> Program:
        parameters = self._parameters()
        late = [index for index, parameter in enumerate(parameters)
                if not parameter.sparse and self._has("adding", 0.1, index)]
        if len(late) == len(parameters):
            late = late[1:]
        optimizers = self._optimizers(parameters, [index for index in range(len(parameters)) if index not in late])
        self._members = [list(optimizer.members) for optimizer in optimizers]
        self._frozen = {index for index, parameter in enumerate(parameters) if parameter.frozen}
        self._late, self._optimizers_drawn, self._parameters_drawn = late, optimizers, parameters
        self._castable = all(optimizer.kind in ("sgd", "momentum") for optimizer in optimizers)
        self._separate = len(optimizers) > 1 and self._has("separate", 0.5)
        waits = set(optimizers[0].wait_in)  # two rounds a step with "backward", one with "step"
        self._disjoint = len(optimizers) == optimizers[0].passes == len(waits) == 1 and self._has("disjoint", 0.2)
        self._nobody_absent = self._disjoint and waits == {"backward"}
        self._weights: tuple[int, ...] = ()
        weighs = all(optimizer.op == "Average" and optimizer.ranks is None for optimizer in optimizers)
        rounds = any(parameter.dtype == "bfloat16" for parameter in parameters)
        if weighs and not rounds and not self._disjoint and self._has("weights", 0.4):
            self._weights = (1, 2, 5) if any(parameter.sparse for parameter in parameters) else (0, 1, 2, 5)
        joins = None
        count = self._stream("steps").randint(8, 18)
        if len(optimizers) == 1 and optimizers[0].ranks is None and self._has("joins", 0.3):
            begin = self._stream("joins", "begin").randint(0, count - 4)
            joins = begin, self._stream("joins", "end").randint(begin + 2, count - 1)
        ends = self._joined(joins)
        self._was_skipped = self._had_joined = False
        steps = []
        for number in range(count):
            active = [ends is None or not joins or not joins[0] <= number < joins[1] or number < ends[rank]
                      for rank in range(self._size)]
            steps.append(self._step(number, active, inside=joins is not None and joins[0] <= number < joins[1],
                                    joins=joins is not None))
            self._had_joined = joins is not None and number + 1 == joins[1]
        return Program(self._seed, self._size, parameters, optimizers, tuple(steps), joins, bool(self._weights))

    def _joined(self, joins: tuple[int, int] | None) -> list[int] | None:
        """Return before which step each rank leaves the loop; one goes on to its end."""
        if joins is None:
            return None
        stream = self._stream("joins", "ranks")
        ends = [stream.randint(joins[0], joins[1]) for _ in range(self._size)]
        ends[stream.randrange(self._size)] = joins[1]
        return ends

    def _parameters(self) -> tuple[Parameter, ...]:
        stream = self._stream("parameters")
        parameters = []
        for index in range(stream.randint(2, 9)):
            shape, dtype, layout = stream.choice(SHAPES), "float32", "plain"
            if self._has("dtypes", 0.3, index):
                dtype = self._stream("dtype", index).choice(["float64", "bfloat16"])
            if self._has("layouts", 0.5, index) and len(shape) in (2, 4):
                layout = "channels_last" if len(shape) == 4 else "transposed"
            sparse = self._has("sparse", 0.12, index)
            parameters.append(Parameter((ROWS, 3) if sparse else shape, "float32" if sparse else dtype,
                                        "plain" if sparse else layout, sparse, self._has("freezing", 0.2, index)))
        return tuple(parameters)

    def _optimizers(self, parameters: Sequence[Parameter], members: list[int]) -> tuple[Optimizer, ...]:
        count = min(len(members), self._stream("several").randint(2, 3)) if self._has("several", 0.4) else 1
        self._stream("cuts").shuffle(members)
        parts = [sorted(members[part::count]) for part in range(count)]
        shared = self._has("passes", 0.25)
        optimizers = []
        for number, part in enumerate(parts):
            stream = self._stream("optimizer", number)
            sparse = [parameters[index].sparse for index in part]
            kind = "sparse_adam" if all(sparse) and stream.random() < 0.7 else "sgd" if any(sparse) else \
                stream.choice(["sgd", "momentum", "momentum", "adam"])
            groups: int | tuple[tuple[int, ...], ...] | None = None
            if self._has("groups", 0.2, number):
                groups = 2 if stream.random() < 0.5 or len(part) < 3 else (tuple(part[:2]), tuple(part[2:]))
            ranks = None
            if self._has("sets", 0.12, number) and self._size > 1:
                ranks = tuple(sorted(self._stream("set", number).sample(range(self._size), self._stream(
                    "set size", number).randint(1, self._size - 1))))
            waits = self._stream("waits", number)
            choice = waits.choice(["backward", "step", "mixed"]) if "wait_in" in self._features else "backward"
            wait_in = tuple(waits.choice(["backward", "step"]) if choice == "mixed" else choice for _ in range(self._size))
            op = "Sum" if self._has("sums", 0.25, number) else "Average"
            optimizers.append(Optimizer(
                tuple(part), kind, op, 2 if shared else 1, groups, stream.random() < 0.5, ranks, wait_in,
                2.0 if op == "Average" and stream.random() < 0.15 else 1.0))
        return tuple(optimizers)

    def _step(self, number: int, active: Sequence[bool], *, inside: bool, joins: bool) -> Step:
        changes = self._changes(number, inside=inside, joins=joins)
        clears = "none"
        if not self._had_joined and self._has("clears", 0.5, number):
            clears = self._stream("clears", "how", number).choice(["zeros", "model", "hand", "keep"])
        if self._weights and clears == "keep":
            clears = "none"  # weighted gradients add up with unweighted ones of the step before
        if self._was_skipped and clears in ("keep", "model", "hand"):
            clears = "none"  # without a step, only zero_grad() says that the gradients are cleared
        if self._disjoint and any(change.kind == "anew" for change in changes):
            clears = "none"  # gradients that a new optimizer finds are reduced in its first round
        own_order = self._circles and self._separate and self._has("circles", 0.3, "order", number)
        turns = tuple(self._turn(number, rank, own_order) if active[rank] else None for rank in range(self._size))
        all_hand_in = all(self._hands_in(turn, rank) for rank, turn in enumerate(turns) if turn is not None)
        skipped = not inside and self._has("skips", 0.08, number)
        # Clipping writes to gradients that no rank has computed in this step: they are reduced, too, which a rank that has
        # joined misses.
        clips = self._has("clips", 0.25, number) and not (inside and clears == "keep")
        synchronizes = skipped or (clips and not all_hand_in) or (clips and self._has("clips", 0.3, "sync", number))
        metric = not inside and self._has("metrics", 0.3, number) and (all_hand_in or synchronizes or self._circles)
        if metric and self._circles and not synchronizes and not clips and not self._disjoint:
            turns = tuple(turn and dataclasses.replace(turn, early=self._has("circles", 0.3, "early", number, rank))
                          for rank, turn in enumerate(turns))
        self._was_skipped = skipped
        return Step(changes, clears, turns, synchronizes, metric, clips, not skipped)

    def _changes(self, number: int, *, inside: bool, joins: bool) -> tuple[Change, ...]:
        changes: list[Change] = []
        for part, members in enumerate(self._members):
            for index in [index for index in self._late if self._has("adding", 0.15, "when", index, number)]:
                if part == index % len(self._members) and not self._parameters_drawn[members[0]].sparse:
                    self._late.remove(index)
                    members.append(index)
                    changes.append(Change("add", index, part))
            for index in members:
                # A rank that has joined would miss that a parameter was trainable for a while.
                if not inside and self._has("freezing", 0.04, "when", index, number):
                    changes.append(Change("thaw" if index in self._frozen else "freeze", index))
                    self._frozen ^= {index}
            if number and not inside and self._has("anew", 0.04, part, number):
                changes.append(Change("anew", part))
        if number and self._castable and not joins and self._has("casts", 0.05, number):
            changes.append(Change("cast", 0, self._stream("cast", number).choice(["float64", "float32"])))
        return tuple(changes)

    def _turn(self, number: int, rank: int, own_order: bool) -> Turn:
        """Return a rank's backward passes: over all optimizers at once, or over one after the other."""
        stream = self._stream("turn", number, rank)
        mine = list(range(len(self._members)))
        targets = [[part] for part in mine] if self._separate else [mine]
        if own_order:
            self._stream("order", number, rank).shuffle(targets)
        absent = not self._nobody_absent and self._has("absent", 0.12, number, rank)
        backwards: list[Backward] = []
        for target in targets:
            passes = self._optimizers_drawn[target[0]].passes
            counting = passes
            if absent and (self._circles or not self._separate):
                counting = stream.randint(0, passes - 1)
            elif absent:
                counting = 0  # of all optimizers: else the waits would close a circle
            if not self._disjoint:
                ahead = stream.choice([0, 0, 1, 2]) if self._has("no_sync", 0.2, number) else 0
                backwards += [self._backward(number, stream, target, tuple(target)) for _ in range(ahead)]
            if self._disjoint and not absent:
                backwards += self._halves(number, stream)
            elif not self._disjoint:
                backwards += [self._backward(number, stream, target) for _ in range(counting)]
        return Turn(tuple(each for each in backwards if each.uses), self._has("keeps", 0.2, number, rank))

    def _backward(self, number: int, stream: random.Random, target: Sequence[int],
                  accumulates: tuple[int, ...] = ()) -> Backward:
        density = self._density(number)
        uses: list[int] = []
        for part in target:
            trainable = [index for index in self._members[part] if index not in self._frozen]
            used = [index for index in trainable if stream.random() < density]
            if trainable and not used and not self._circles:
                used = [stream.choice(trainable)]
            uses += used
        scale = 0.5 + stream.random()
        weight = self._stream("weight", number, scale).choice(self._weights) if self._weights else None
        return Backward(tuple(uses), scale, accumulates, weight)

    def _halves(self, number: int, stream: random.Random) -> list[Backward]:
        """Return two backward passes over gradients that have nothing in common; the same two halves on all ranks."""
        trainable = [index for index in self._members[0] if index not in self._frozen]
        halves = [trainable[:len(trainable) // 2], trainable[len(trainable) // 2:]]
        passes = []
        for half in halves:
            used = [index for index in half if stream.random() < self._density(number)] or half[:1]
            passes.append(Backward(tuple(used), 0.5 + stream.random()))
        return passes

    def _density(self, number: int) -> float:
        return self._stream("density", number).choice([1.0, 1.0, 0.8, 0.4]) if "missing" in self._features else 1.0

    def _hands_in(self, turn: Turn, rank: int) -> bool:
        """Return whether a rank's backward passes end every optimizer's round there."""
        for part, (optimizer, members) in enumerate(zip(self._optimizers_drawn, self._members, strict=True)):
            if optimizer.ranks is not None and rank not in optimizer.ranks:
                continue
            if not any(index not in self._frozen for index in members):
                return False
            counting = [each for each in turn.backwards if not each.accumulates and set(each.uses) & set(members)]
            if len(counting) < max(optimizer.passes, 1 + self._disjoint) or any(
                    part in each.accumulates for each in turn.backwards[-1:]):
                return False
        return True
