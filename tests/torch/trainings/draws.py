"""What a training is made of. No torch, no ranks.

A training is drawn feature by feature, in an order that is drawn too. A value that contradicts what has been drawn before is
left out: `RULES` says what is never combined, and why.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

EVENTS = ("none", "reload", "reload on rank 0", "add_param_group", "freeze", "thaw", "double", "deepcopy", "copy both",
          "evaluate", "skip", "regroup", "init anew")
FEATURES: dict[str, tuple[object, ...]] = {
    "scoped": (False, True),
    "model": ("mlp", "sync batch norm", "channels last", "embedding", "sparse embedding", "lstm", "gru", "transformer",
              "tied", "unused", "frozen", "weight norm", "spectral norm", "complex", "parameter list", "checkpoint",
              "reentrant checkpoint", "reentrant twice", "all reentrant", "layer twice", "bfloat16 part", "float64 part",
              "float32 gradients",
              "experts", "functional call", "custom function", "lazy", "wide"),
    "optimizer": ("SGD", "momentum", "nesterov", "Adam", "amsgrad", "AdamW foreach", "AdamW fused", "Adagrad", "RMSprop",
                  "NAdam", "RAdam", "Adamax", "Adadelta", "LBFGS", "LBFGS strong_wolfe", "SparseAdam"),
    "structure": ("one", "groups", "two", "in turns"),
    "loss": ("mse", "huber", "cross entropy", "penalty", "disjoint", "weighted"),
    "gradients": ("backward", "create graph", "closure", "autograd.grad", "func.grad"),
    "returns": ("mean", "local"),
    "accumulation": ("none", "passes", "no_sync", "naive"),
    "groups": ("none", "number", "lists"),
    "compression": ("none", "fp16", "bf16"),
    "predivide": (1.0, 2.0),
    "op": ("Average", "Sum"),
    "process_set": ("default", "global"),
    "sparse_as_dense": (False, True),
    "wait_in": ("default", "backward", "step", "mixed"),
    "hook": (False, True),
    "named": (False, True),
    "scaled_rate": (False, True),
    "loader": ("list", "DataLoader", "shuffled", "batch sampler", "iterable"),
    "clears": ("zero_grad", "zeros", "model", "model zeros", "hand", "hand zeros", "kept list", "flat buffer"),
    "clips": ("none", "norm", "value", "step hook"),
    "scheduler": ("none", "StepLR first", "StepLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau"),
    "amp": ("none", "autocast", "scaler", "infinity", "autocast and scaler"),
    "hooks": ("none", "tensor", "before wrapping", "after wrapping"),
    "averaged": (False, True),
    "begins": ("same seed", "broadcast before", "broadcast after"),
    "event": EVENTS,
    "later_event": EVENTS,
    "thread": ("main", "steps", "metrics"),
    "compiled": (False, True),
    "uneven": (False, True),
    "shares": ("equal", "list", "random"),
    "weighted": (False, True),
    "sharded": (False, True),
}
"""By name of a feature, its values; the first one is the plain one."""
FIRST = ("model", "optimizer", "scoped")
"""What is drawn first, as most rules are about these."""
CHANCES = {"model": 1.0, "optimizer": 1.0, "scoped": 1.0, "loader": 1.0, "returns": 1.0, "sparse_as_dense": 1.0,
           "named": 1.0, "event": 0.7, "later_event": 0.5, "compiled": 0.06}
"""How probable it is that a feature is drawn from all of its values; else it has the plain one. By default `CHANCE`."""
CHANCE = 0.35


@dataclasses.dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        scoped: whether in the scope of a strategy, with global batches; else each rank has its part.
        structure: what the parameters belong to: one optimizer, two groups of one, two optimizers, or a generator's and a
            discriminator's.
        gradients: who computes them: `backward()`, with a graph or without, a closure, or the script, which sets them by
            hand.
        returns: what a closure returns: the loss of all ranks' rows, or that of this rank's.
        accumulation: how the gradients of `batches` batches add up before a step.
        predivide: the gradient_predivide_factor.
        hook: whether `comm_hook=AllReduce()` reduces.
        named: whether the optimizer gets named_parameters.
        scaled_rate: whether the strategy scales learning rates.
        loader: what the strategy distributes.
        clears: how gradients are cleared; "kept list" and "flat buffer" write zeros to tensors that the script has kept.
        amp: with "infinity" a scaler, and one rank's loss is infinite in one step.
        hooks: the user's hooks on a gradient: of the tensor, or post-accumulate ones. They scale it.
        averaged: whether there is an exponential moving average of the model.
        begins: whether ranks begin alike, or take rank 0's values over, before or after wrapping.
        event: what happens before step `when`.
        later_event: what happens before step `later`.
        thread: "steps": each step runs in a new thread. "metrics": another thread calls collectives meanwhile.
        compiled: whether `torch.compile` traces the step.
        uneven: whether the last batch of an epoch has an odd number of rows (in a scope), or ranks run out of batches at
            different times and `join()`.
        shares: of ranks in the strategy's global batches; "random" ones are others in each batch.
        weighted: whether ranks divide each batch at random and `set_weight`; some have weight 0.
        sharded: whether each rank has the optimizer state of some parameters only.
        rows: of a global batch.
        batches: of a step.
        steps: in each epoch.
        size: how many ranks there are.
        device: where the model and the data are, "cpu" or "cuda".
    """

    seed: int
    size: int = 2
    device: str = "cpu"
    scoped: bool = False
    model: str = "mlp"
    optimizer: str = "SGD"
    structure: str = "one"
    loss: str = "mse"
    gradients: str = "backward"
    returns: str = "mean"
    accumulation: str = "none"
    groups: str = "none"
    compression: str = "none"
    predivide: float = 1.0
    op: str = "Average"
    process_set: str = "default"
    sparse_as_dense: bool = False
    wait_in: str = "default"
    hook: bool = False
    named: bool = False
    scaled_rate: bool = False
    loader: str = "list"
    clears: str = "zero_grad"
    clips: str = "none"
    scheduler: str = "none"
    amp: str = "none"
    hooks: str = "none"
    averaged: bool = False
    begins: str = "same seed"
    event: str = "none"
    later_event: str = "none"
    thread: str = "main"
    compiled: bool = False
    uneven: bool = False
    shares: str = "equal"
    weighted: bool = False
    sharded: bool = False
    rows: int = 4
    batches: int = 1
    steps: int = 3
    epochs: int = 1
    when: int = 1
    later: int = 2

    @property
    def events(self) -> dict[int, str]:
        """By step, what happens before it."""
        return {self.when: self.event, self.later: self.later_event}

    @property
    def dtype(self) -> str:
        """Of the model and the data."""
        is_single = self.amp != "none" or "double" in self.events.values() or self.model in MIXED
        return "float32" if is_single else "float64"

    @property
    def is_sparse(self) -> bool:
        """Whether there are sparse gradients. `sparse_as_dense` is about how they travel."""
        return self.model == "sparse embedding"

    @property
    def rounds(self) -> bool:
        """Whether something has 16 bits."""
        return self.compression != "none" or "autocast" in self.amp or self.model in ("bfloat16 part", "float32 gradients")

    @property
    def scales(self) -> bool:
        """Whether there is a GradScaler."""
        return "scaler" in self.amp or self.amp == "infinity"

    @property
    def left(self) -> int:
        """How many rows the last batch of an epoch has in a scope."""
        if self.model == "sync batch norm":  # a batch of one row is on all ranks: it normalises with two rows
            return self.size + 1
        return (1, 3, self.rows - 1)[self.seed % 3]

    @property
    def total(self) -> int:
        """The number of steps in all."""
        return self.steps * self.epochs

    def __str__(self) -> str:
        told = [f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self)
                if field.name in ("seed", "model", "optimizer") or getattr(self, field.name) != field.default]
        return f"Training({', '.join(told)})"


MIXED = ("bfloat16 part", "float64 part", "float32 gradients")
"""Models with parameters of several dtypes."""
KEPT = ("kept list", "flat buffer")
"""Ways to clear gradients that write to tensors which the script has kept."""
ZEROS = ("model zeros", "hand zeros", *KEPT)
REENTRANT = ("reentrant checkpoint", "reentrant twice", "all reentrant")
RECURRENT = ("lstm", "gru")
OUTSIDE = ("groups", "predivide", "op", "process_set", "sparse_as_dense", "wait_in", "hook", "named", "begins", "weighted",
           "sharded")
"""Options of `DistributedOptimizer` that a strategy does not have, and broadcasts that it makes by itself."""
PLAIN = {name: values[0] for name, values in FEATURES.items()}


def _differs(training: Training, *names: str) -> bool:
    return any(getattr(training, name) != PLAIN[name] for name in names)


RULES: dict[str, Callable[[Training], bool]] = {
    # What torch refuses, or gives no meaning to.
    "LBFGS takes a closure, and one group of dense parameters": lambda it: it.optimizer.startswith("LBFGS") and (
        it.gradients != "closure" or it.structure != "one" or it.is_sparse or it.event == "add_param_group"),
    "LBFGS takes gradients that it can view as vectors": lambda it: (
        it.optimizer.startswith("LBFGS") and it.model == "channels last"),
    "torch's copy of LBFGS has lost its parameters": lambda it: it.optimizer.startswith("LBFGS") and it.event == "copy both",
    "torch's hooks on gradients take dense ones": lambda it: it.is_sparse and it.hooks != "none",
    "SparseAdam takes sparse gradients; the other parameters have an optimizer of their own": lambda it: (
        it.optimizer == "SparseAdam" and (not it.is_sparse or it.structure != "two" or it.event == "add_param_group")),
    "of the others, SGD and Adagrad take sparse gradients": lambda it: it.is_sparse and it.optimizer not in (
        "SGD", "Adagrad", "SparseAdam"),
    "torch clips dense gradients only": lambda it: it.is_sparse and it.clips != "none",
    "torch neither clamps complex numbers nor scales them": lambda it: it.model == "complex" and (
        it.clips == "value" or it.amp != "none" or it.optimizer in ("AdamW fused", "Adamax")),
    "only closures return losses": lambda it: it.returns != "mean" and it.gradients != "closure",
    "Adagrad of older torch has no state for a group that is added": lambda it: (
        it.optimizer == "Adagrad" and it.event == "add_param_group"),
    "most schedulers of torch refuse a group that is added": lambda it: it.event == "add_param_group" and (
        it.scheduler not in ("none", "StepLR", "StepLR first")),
    "a closure is one backward pass, without a scaler": lambda it: it.gradients == "closure" and (
        it.accumulation != "none" or it.scales or it.structure in ("two", "in turns")),
    "reentrant checkpoints take backward() only, and once": lambda it: it.model in REENTRANT and (
        it.gradients in ("autograd.grad", "func.grad") or it.loss == "penalty"),
    "functions of torch.func take no such layers": lambda it: it.gradients == "func.grad" and (
        it.model in (*RECURRENT, "checkpoint", "functional call", "sync batch norm", "custom function", "spectral norm",
                     "sparse embedding", "experts")),
    "integers have no gradient": lambda it: it.loss == "penalty" and "embedding" in it.model,
    "attention has no second derivative on a CPU, and the function of our own is not differentiable twice": lambda it: (
        it.loss == "penalty" and it.model in ("transformer", "custom function")),
    "torch.autograd.grad does not work inside torch.func.grad": lambda it: (
        it.loss == "penalty" and it.gradients == "func.grad"),
    "state of the old dtype is not for parameters of the new one": lambda it: it.event == "double" and (
        it.optimizer != "SGD" or it.averaged or it.amp != "none" or it.model in MIXED),
    "on a GPU, nobody looks for zeros that a script writes to unused parts": lambda it: (
        it.device == "cuda" and it.uneven and not it.scoped and it.model in ("experts", "unused") and it.clears in ZEROS),
    "on a GPU, torch unscales no bfloat16": lambda it: (
        it.device == "cuda" and it.scales and it.model in ("bfloat16 part", "float32 gradients")),
    "a scaler unscales once between two steps": lambda it: it.event == "skip" and it.scales,
    "of torch's optimizers, SGD takes gradients of another dtype": lambda it: it.model == "float32 gradients" and (
        it.optimizer not in ("SGD", "momentum", "nesterov") or it.averaged),
    "torch.func's gradients have the parameters' dtype": lambda it: (
        it.model == "float32 gradients" and it.gradients == "func.grad"),
    "gradients that are kept are those of one model, and dense": lambda it: it.clears in KEPT and (
        it.is_sparse or it.event in ("double", "copy both") or it.gradients in ("autograd.grad", "func.grad")),
    "zeros are not written to gradients that have a graph": lambda it: it.gradients == "create graph" and it.clears in (
        "zeros", *ZEROS),
    "these have no second derivatives": lambda it: it.gradients == "create graph" and (
        it.model in (*REENTRANT, "transformer", "custom function", "sparse embedding", "sync batch norm", *RECURRENT)
        or it.hooks.endswith("wrapping") or it.accumulation in ("naive", "no_sync", "passes") or it.loss == "penalty"),
    "there is a frozen part to thaw in one model": lambda it: it.event == "thaw" and it.model != "frozen",
    "a scheduler keeps its optimizer": lambda it: it.event == "copy both" and it.scheduler != "none",
    "a generator has one kind of loss, and a discriminator one": lambda it: it.structure == "in turns" and (
        it.loss != "mse" or it.gradients != "backward" or it.accumulation != "none" or it.is_sparse),
    "gradients that are set add up by hand": lambda it: it.gradients in ("autograd.grad", "func.grad") and (
        it.accumulation != "none" or it.loss == "disjoint" or it.hooks not in ("none", "tensor")),
    "hooks are not called for functions": lambda it: it.gradients == "func.grad" and it.hooks != "none",
    "LBFGS' vectors have one dtype": lambda it: (
        it.optimizer.startswith("LBFGS") and it.model in MIXED),
    "a scaler refuses to step an optimizer without any gradient": lambda it: it.scales and it.structure == "two" and (
        it.event == "freeze" or it.model in ("frozen", "unused")),
    "a saved optimizer has the groups that it is loaded into, and a saved model the dtype": lambda it: (
        it.event in ("add_param_group", "double") and it.later_event in ("reload", "reload on rank 0", "init anew")),
    "these happen once": lambda it: it.event == it.later_event and it.event in ("add_param_group", "freeze", "double"),
    "a group that is added has no gradients yet": lambda it: it.event == "thaw" and it.later_event == "add_param_group",
    "compiled, torch.func.grad fails after a break of the graph": lambda it: it.compiled and it.gradients == "func.grad",
    "compiled, gradients of another dtype fail after a break of the graph": lambda it: (
        it.compiled and it.model == "float32 gradients"),
    "compiled, strong_wolfe's numbers are tensors": lambda it: it.compiled and it.optimizer == "LBFGS strong_wolfe",
    # What is not promised.
    "the compiler expects that reading a gradient changes nothing": lambda it: (
        it.compiled and it.wait_in in ("step", "mixed") and it.clips != "none"),
    "a strategy, its batches and calls of other threads are of one init()": lambda it: (
        it.event == "init anew" and (it.scoped or it.thread == "metrics")),
    "ranks that have joined call no other collectives": lambda it: (
        it.uneven and not it.scoped and it.thread == "metrics"),
    "a strategy has none of these options": lambda it: it.scoped and _differs(it, *OUTSIDE),
    "a strategy scales the rates of groups that are added": lambda it: it.scaled_rate and it.event == "regroup",
    "these belong to a strategy": lambda it: not it.scoped and _differs(it, "scaled_rate", "loader", "shares"),
    "copies are not in the scope": lambda it: it.scoped and it.event == "copy both",
    "a hook decides itself how to average": lambda it: it.hook and _differs(it, "groups", "compression", "predivide", "op"),
    "weights are of averages, and of passes that make one round": lambda it: it.weighted and (
        it.op != "Average" or it.hook or it.accumulation == "naive" or it.loss == "disjoint" or it.uneven
        or (it.structure == "in turns" and it.amp == "infinity")),  # the other one's pass finds reduced gradients
    "a sharded optimizer has a part of its state, which is neither copied nor taken over": lambda it: it.sharded and (
        it.optimizer.startswith("LBFGS") or it.uneven or "copy both" in it.events.values()
        or "init anew" in it.events.values()),
    "only averages are divided": lambda it: it.predivide != 1.0 and it.op != "Average",
    "only rows can be made dense": lambda it: it.sparse_as_dense and not it.is_sparse,
    "a second pass onto sums would count the first one twice": lambda it: (
        (it.accumulation == "naive" and (it.op == "Sum" or it.compression != "none"))
        or (it.loss == "disjoint" and it.op == "Sum")),
    "LBFGS' losses are reduced like gradients: a mean would be summed": lambda it: (
        it.optimizer.startswith("LBFGS") and it.op == "Sum" and it.returns == "mean"),
    "a rank that has no gradient for any parameter of an optimizer comes too late to clip": lambda it: (
        it.model == "experts" and it.structure == "two" and it.clips != "none"),
    "only the optimizer's zero_grad tells that sums begin anew, where no step has used them": lambda it: (
        (it.op == "Sum" or it.weighted) and it.clears in ZEROS and (it.event == "skip" or it.amp == "infinity"
                                                   or it.structure == "in turns" or it.optimizer.startswith("LBFGS"))),
    "a hook that scales what has accumulated is called where a pass adds to it, which not all ranks' passes do": lambda it: (
        it.model == "experts" and it.hooks.endswith("wrapping") and it.accumulation != "none"),
    "ranks that wait in different places make different numbers of reductions": lambda it: it.wait_in == "mixed" and (
        it.loss == "disjoint" or (it.hooks.endswith("wrapping") and it.accumulation == "naive")),
    "ranks that have joined take over parameters and optimizers from the last one, nothing else": lambda it: (
        it.uneven and not it.scoped and (
            _differs(it, "averaged", "scheduler", "amp", "hook", "accumulation") or it.structure == "in turns"
            or it.model == "sync batch norm" or it.optimizer.startswith("LBFGS") or it.wait_in == "mixed")),
    "gradients by hand come after backward(), which weighs uneven batches": lambda it: (
        it.scoped and (it.uneven or it.shares != "equal") and it.gradients in ("autograd.grad", "func.grad")),
    "a batch is taken, and weighed, before a script casts": lambda it: (
        it.scoped and (it.uneven or it.shares != "equal") and "double" in (it.event, it.later_event)),
    "inside join(), losses are added: backward() is called once": lambda it: (
        it.uneven and not it.scoped and it.loss == "disjoint"),
    "join() is of the optimizer with which the epoch began": lambda it: it.uneven and not it.scoped and it.event in (
        "reload", "reload on rank 0", "copy both", "init anew"),
    "hooks hand over dense gradients, which SparseAdam does not take": lambda it: it.hook and it.optimizer == "SparseAdam",
    "of many numbers that are rounded, some differ more": lambda it: it.model == "wide" and (
        it.rounds or it.dtype == "float32"),
    "rounded losses decide otherwise": lambda it: it.rounds and (
        it.scheduler == "ReduceLROnPlateau" or it.optimizer.startswith("LBFGS")),
}
"""What is never combined, by the reason."""

COMING: dict[str, Callable[[Training], bool]] = {
    "two passes onto the same gradients": lambda it: it.accumulation == "naive",
    "hooks after wrapping": lambda it: it.hooks == "after wrapping",
    "all parameters in reentrant checkpoints": lambda it: it.model == "all reentrant",
    "second derivatives of SyncBatchNorm": lambda it: it.loss == "penalty" and it.model == "sync batch norm",
    "local losses of LBFGS": lambda it: it.returns == "local" and it.optimizer.startswith("LBFGS"),
    "buffers of ranks that have joined": lambda it: it.uneven and not it.scoped and it.model == "spectral norm",
    "join() of two optimizers, which may find two last ranks": lambda it: (
        it.uneven and not it.scoped and it.structure == "two"),
    "gradients of one rank that a closure clears without the optimizer": lambda it: (
        it.model == "experts" and it.optimizer.startswith("LBFGS") and it.clears in ("model", "hand")),
    "hooks that scale what has accumulated, where passes are set aside": lambda it: (
        it.hooks.endswith("wrapping") and it.accumulation == "naive" and it.wait_in == "step"),
    "copies of optimizers": lambda it: it.event == "copy both",
    "a layer in two reentrant checkpoints": lambda it: it.model == "reentrant twice",
    "zeros that a script writes over gradients that no step has used": lambda it: (
        it.clears in ZEROS
        and (it.event == "skip" or it.amp == "infinity" or it.structure == "in turns")),
    "zeros written by hand to parts that not all ranks use, in join()": lambda it: (
        it.uneven and not it.scoped and it.model in ("experts", "unused") and it.clears in ZEROS),
    "disjoint losses with backward_passes_per_step": lambda it: it.accumulation == "passes" and it.loss == "disjoint",
    "gradients that a script sets": lambda it: it.gradients in ("autograd.grad", "func.grad"),
    "kept gradients of parts that a pass does not reach, in batches with weights": lambda it: (
        it.scoped and (it.uneven or it.shares != "equal") and it.clears in KEPT
        and (it.model == "experts" or it.loss == "disjoint")),
}
LATER: tuple[str, ...] = ()
"""What of these does not work yet, and is not drawn."""


def draw(seed: int, size: int = 2, device: str = "cpu") -> Training:
    """Return the training of a seed on so many ranks."""
    rng = random.Random(f"training {seed}")
    training = Training(seed, size, device)
    features = list(FEATURES)
    rng.shuffle(features)
    features.sort(key=lambda name: name not in FIRST)
    for name in features:
        values = FEATURES[name]
        wanted = rng.choice(values) if rng.random() < CHANCES.get(name, CHANCE) else values[0]
        training = _with(training, name, wanted)
    batches = 1 if training.accumulation == "none" else rng.randint(2, 3)
    steps = rng.choice((3, 4, 5, 9)) if batches == 1 else 3
    if training.optimizer.startswith("LBFGS"):  # which makes rounding errors larger from step to step
        steps = min(steps, 5)
    rows = size * rng.randint(2, 4)
    epochs = rng.choice((1, 1, 2)) if steps == 3 else 1
    times = [step for step in range(1, steps * epochs) if step % steps != steps - 1]  # where no rank has joined
    when = rng.choice(times)
    later = rng.choice([step for step in times if step > when] or [0])
    return dataclasses.replace(training, rows=rows, batches=batches, steps=steps, epochs=epochs, when=when, later=later,
                               later_event=training.later_event if later else "none")


def _with(training: Training, name: str, value: object) -> Training:
    """Return the training with a feature, and with what it cannot do without; as it was where that contradicts the rules."""
    changed = dataclasses.replace(training, **{name: value})
    if name == "optimizer" and str(value).startswith("LBFGS"):
        changed = dataclasses.replace(changed, gradients="closure")
    if name == "optimizer" and value == "SparseAdam":
        changed = dataclasses.replace(changed, model="sparse embedding", structure="two")
    if name.endswith("event") and value == "thaw":
        changed = dataclasses.replace(changed, model="frozen")
    if name == "model" and value == "sparse embedding" and changed.optimizer not in ("SGD", "Adagrad", "SparseAdam"):
        changed = dataclasses.replace(changed, optimizer="SGD", gradients="backward")
    return training if why_not(changed) else changed


def why_not(training: Training) -> str:
    """Return why a training is not drawn; nothing where it may be."""
    each = [training]
    if training.later_event != "none":
        each.append(dataclasses.replace(training, event=training.later_event, later_event="none"))
    reasons = [reason for reason, refuses in RULES.items() if any(map(refuses, each))]
    reasons += [name for name in LATER if any(map(COMING[name], each))]
    return "; ".join(reasons)
