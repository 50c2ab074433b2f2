"""The training script, as a user writes it. It is the same for every side."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.nn import functional
from torch.optim import swa_utils

from tests.torch.trainings import optimizers
from tests.torch.trainings.draws import KEPT, Training
from tests.torch.trainings.models import Discriminator, Model, losses, samples
from tests.torch.trainings.sides import Alone, Batch

LONGEST, LARGEST = 0.3, 0.05
"""To what norm and to what value gradients are clipped."""


def train(training: Training, side: Alone) -> dict[str, torch.Tensor]:
    """Train, and return what there is to compare, by name."""
    script = Script(training, side)
    for epoch in range(training.epochs):
        script.number = epoch * training.steps
        batches = side.batches()
        with side.joining(script.optimizers, script.model):
            for batch in batches:
                script.threaded_step(itertools.chain([batch], itertools.islice(batches, training.batches - 1)))
    return script.results()


class Script:
    """A training under way.

    Attributes:
        model: the model, or the generator.
        critic: the discriminator of a generator.
        found: what has been found so far, by name.
        number: of the step, on all ranks; where one of them runs out of batches it misses some.
    """

    def __init__(self, training: Training, side: Alone) -> None:
        self.training, self.side = training, side
        if training.compiled:
            torch._dynamo.reset()  # of what other trainings have compiled
        self.found: dict[str, torch.Tensor] = {}
        self.number = 0
        self.scaler = torch.amp.GradScaler(training.device, init_scale=64.0, growth_interval=2,
                                           enabled=training.scales)
        self.kept: dict[int, torch.Tensor] = {}  # gradients that the script clears, by parameter; or flat buffers
        self.build(side.seed)
        self.average: Any = None
        if training.averaged:
            self.average = swa_utils.AveragedModel(self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8))

    # --- what is made ------------------------------------------------------------------------------------------------

    def build(self, seed: int) -> None:
        """Make models, optimizers and schedulers."""
        training = self.training
        self.scheduler: Any = None
        with self.side.scope():
            torch.manual_seed(seed)
            self.model: Any = Model(training).typed(training)
            if training.model == "lazy":
                self.model(samples(training, 2)[0])
            self.model = self.side.converted(self.model)
            self.critic: Any = None
            if training.structure == "in turns":
                self.critic = Discriminator().to(training.device, getattr(torch, training.dtype))
            if training.hooks in ("tensor", "before wrapping"):
                self.hook()
            self.optimizers = self.plain()
            if training.scheduler == "StepLR first":
                self.schedule()
        self.keep_gradients()
        self.wrap()
        if training.hooks == "after wrapping":
            self.hook()
        if training.scheduler not in ("none", "StepLR first"):
            self.schedule()

    def keep_gradients(self) -> None:
        """Let gradients be views of a flat buffer for each dtype, if that is how they are cleared."""
        self.kept = {}
        if self.training.clears != "flat buffer":
            return
        for parameter in (parameter for module in self.modules() for parameter in module.parameters()):
            if parameter.requires_grad:
                flat = torch.zeros(parameter.numel(), dtype=parameter.grad_dtype, device=parameter.device)
                parameter.grad = flat.view(parameter.shape)
                self.kept[id(parameter)] = flat

    def wrap(self) -> None:
        """Wrap the optimizers."""
        for optimizer in self.optimizers:
            if self.training.clips == "step hook":
                optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self.clip(_parameters(optimizer)))
        owners = [self.model, self.critic or self.model]
        self.optimizers = [self.side.wrapped(optimizer, owner)
                           for optimizer, owner in zip(self.optimizers, owners, strict=False)]

    def plain(self) -> list[Any]:
        """Return new optimizers."""
        parameters = [parameter for name, parameter in self.model.named_parameters() if not name.startswith("extra")]
        half = (len(parameters) + 1) // 2
        match self.training.structure:
            case "groups":
                return [self.optimizer([{"params": parameters[:half]},
                                        {"params": parameters[half:], "lr": 0.01 * self.side.rate}])]
            case "two" if self.training.optimizer == "SparseAdam":
                return [self.optimizer(parameters[:1]), torch.optim.Adam(parameters[1:], lr=0.02 * self.side.rate, eps=1e-2)]
            case "two":
                return [self.optimizer(parameters[:half]), self.optimizer(parameters[half:])]
            case "in turns":
                return [self.optimizer(parameters), self.optimizer(list(self.critic.parameters()))]
        return [self.optimizer(parameters)]

    def optimizer(self, parameters: list[Any]) -> torch.optim.Optimizer:
        """Return a new optimizer."""
        return optimizers.optimizer(self.training.optimizer, parameters, 0.02 * self.side.rate)

    def schedule(self) -> None:
        """Make the scheduler of the first optimizer."""
        self.scheduler = optimizers.scheduler(self.training.scheduler, self.optimizers[0], self.training.total)

    def hook(self) -> None:
        """Halve a gradient by a hook of the user."""
        parameter = next(parameter for parameter in self.model.parameters() if parameter.requires_grad)
        if self.training.hooks == "tensor":
            parameter.register_hook(lambda gradient: gradient * 0.5)
        else:
            parameter.register_post_accumulate_grad_hook(_halve)

    def modules(self) -> list[torch.nn.Module]:
        """Return what trains."""
        return [module for module in (self.model, self.critic) if module is not None]

    # --- a step ------------------------------------------------------------------------------------------------------

    def threaded_step(self, batches: Iterator[Batch]) -> None:
        """Carry out a step, in the thread that is drawn or beside one."""
        if self.training.thread == "main":
            self.step(batches)
            return
        with ThreadPoolExecutor(1) as other:
            if self.training.thread == "steps":
                other.submit(self.step, batches).result()
                return
            counts = other.submit(self.side.count_ranks, 3)
            self.step(batches)
            assert counts.result() == [self.training.size] * 3

    def step(self, batches: Iterator[Batch]) -> None:
        """Carry out a step with a batch, or with several whose gradients accumulate.

        Args:
            batches: what a step takes. In a scope the batch taken last decides about weights: so they are taken one by one.
        """
        training = self.training
        happens = training.events.get(self.number, "none")
        self.happen(happens)
        if any(event == "double" and self.number >= when for when, event in training.events.items()):
            batches = ((x.double() if x.is_floating_point() else x, y.double(), factor) for x, y, factor in batches)
        learn = torch.compile(self.learn, backend="eager") if training.compiled else self.learn
        self.record(learn(batches, skips=happens == "skip"))
        self.number += 1

    def learn(self, batches: Iterator[Batch], *, skips: bool) -> float:
        """Compute gradients and let the optimizers step, or skip that; return the loss."""
        training = self.training
        self.clear()
        if training.gradients == "closure":
            return self.closed(*next(batches))
        if training.structure == "in turns":
            return self.turns(*next(batches))
        metric = sum(self.backward(*batch, is_last=index == training.batches - 1) for index, batch in enumerate(batches))
        if not skips:
            self.update(self.optimizers, self.model.parameters())
            self.scaler.update() if self.scaler.is_enabled() else None
        return metric

    def record(self, metric: float) -> None:
        """Let time pass for what follows the step, and keep numbers of it."""
        training = self.training
        if self.scheduler is not None:
            self.scheduler.step(*[metric] * (training.scheduler == "ReduceLROnPlateau"))
        if self.average is not None:
            self.average.update_parameters(self.model)
        if not training.uneven or training.scoped:  # else one rank has fewer of them
            self.found[f"loss of step {self.number}"] = torch.tensor(metric)
            self.found[f"rates of step {self.number}"] = torch.tensor([
                float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups])

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        """Return the losses of a batch."""
        with self.autocast():
            return losses(self.training, self.model, x, y)

    def autocast(self) -> Any:
        """Return what a forward pass is in."""
        return torch.autocast(self.training.device, torch.bfloat16, enabled="autocast" in self.training.amp)

    def backward(self, x: torch.Tensor, y: torch.Tensor, factor: float, *, is_last: bool) -> float:
        """Compute gradients of a batch; return its loss."""
        training = self.training
        self.side.weigh(self.optimizers)
        if training.gradients == "func.grad":
            return self.functional(x, y, factor)
        found = self.loss(x, y)
        metric = self.side.mean(sum(found))
        scaled = [self.scaler.scale(loss * factor * self.infinity()) for loss in found]
        if training.gradients == "autograd.grad":
            parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(scaled[0], parameters, allow_unused=True)
            self.put(dict(zip(parameters, gradients, strict=True)))
            return metric
        suspends = training.accumulation == "no_sync" and not is_last
        with self.side.accumulating(self.optimizers) if suspends else contextlib.nullcontext():
            for loss in scaled:
                loss.backward(create_graph=training.gradients == "create graph")
        return metric

    def closed(self, x: torch.Tensor, y: torch.Tensor, factor: float) -> float:
        """Let the optimizer step with a closure; return the loss that it found first."""
        measured = []

        def closure() -> torch.Tensor:
            self.clear()
            loss: Any = sum(self.loss(x, y))
            self.side.weigh(self.optimizers)
            (loss * factor).backward()
            if self.training.clips in ("norm", "value"):
                self.clip(self.model.parameters())
            measured.append(self.side.mean(loss))
            return loss.new_tensor(measured[-1]) if self.training.returns == "mean" else loss * factor
        self.optimizers[0].step(closure)
        return measured[0]

    def functional(self, x: torch.Tensor, y: torch.Tensor, factor: float) -> float:
        """Set gradients from a function of the parameters; return the loss."""
        parameters = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

        def loss(values: Any) -> Any:
            with self.autocast():
                found, = losses(self.training, self.model, x, y,
                                at=lambda x: torch.func.functional_call(self.model, values, (x,)))
            return self.scaler.scale(found * factor * self.infinity()), found
        values = {name: parameter.detach() for name, parameter in parameters.items()}
        gradients, found = torch.func.grad(loss, has_aux=True)(values)
        self.put({parameter: gradients[name] for name, parameter in parameters.items()})
        return self.side.mean(found)

    def put(self, gradients: dict[Any, Any]) -> None:
        """Set gradients by hand; they are to be reduced before anything looks at them."""
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        if self.training.clips != "none" or self.scaler.is_enabled():
            self.side.synchronize(self.optimizers)

    def infinity(self) -> float:
        """Return by what the loss of this step is multiplied."""
        is_infinite = self.training.amp == "infinity" and self.number == self.training.total // 2
        return float("inf") if is_infinite and self.side.meets_infinity else 1.0

    def turns(self, x: torch.Tensor, y: torch.Tensor, factor: float) -> float:
        """Train the discriminator and then the generator."""
        self.clear()
        with self.autocast():
            outputs = self.model(x)
            told = functional.softplus(-self.critic(y)).mean() + functional.softplus(self.critic(outputs.detach())).mean()
        self.side.weigh(self.optimizers)
        self.scaler.scale(told * factor * self.infinity()).backward()
        self.update(self.optimizers[1:], self.critic.parameters())
        with self.autocast():
            fooled = functional.softplus(-self.critic(outputs)).mean() + functional.mse_loss(outputs, y)
        self.side.weigh(self.optimizers)
        self.scaler.scale(fooled * factor).backward()
        self.update(self.optimizers[:1], self.model.parameters())
        self.scaler.update() if self.scaler.is_enabled() else None
        return self.side.mean(told + fooled)

    def update(self, optimizers: list[Any], parameters: Any) -> None:
        """Let optimizers step with their gradients."""
        if self.training.clips in ("norm", "value"):
            for optimizer in optimizers if self.scaler.is_enabled() else ():
                self.scaler.unscale_(optimizer)
            self.clip(parameters)
        for optimizer in optimizers:
            self.scaler.step(optimizer)

    def clip(self, parameters: Any) -> None:
        """Clip gradients."""
        if self.training.clips == "value":
            torch.nn.utils.clip_grad_value_(parameters, LARGEST)
        elif self.training.clips != "none":
            torch.nn.utils.clip_grad_norm_(parameters, LONGEST)

    def clear(self) -> None:
        """Clear gradients."""
        how = self.training.clears
        modules = self.modules()
        if how in ("zero_grad", "zeros"):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=how == "zero_grad")
        elif how in ("model", "model zeros"):
            for module in modules:
                module.zero_grad(set_to_none=how == "model")
        elif how in KEPT:
            gradients = {id(each): each.grad for module in modules for each in module.parameters() if each.grad is not None}
            self.kept = gradients | self.kept
            torch._foreach_zero_(list(self.kept.values())) if self.kept else None
        for parameter in (parameter for module in modules for parameter in module.parameters() if how.startswith("hand")):
            if how == "hand":
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # --- what happens once -------------------------------------------------------------------------------------------

    def happen(self, event: str) -> None:
        """Do what a user does between two steps."""
        match event:
            case "reload" | "reload on rank 0":
                self.reload(everywhere=event == "reload")
            case "add_param_group":
                self.model.extra.requires_grad_(True)
                self.optimizers[0].add_param_group({"params": list(self.model.extra.parameters()),
                                                    "lr": 0.01 * self.side.rate})
            case "freeze":
                next(parameter for parameter in self.model.parameters() if parameter.requires_grad).requires_grad_(False)
            case "thaw":
                self.model.requires_grad_(True)
            case "double":
                for module in self.modules():
                    module.double()
            case "deepcopy":
                copied = copy.deepcopy(self.model)
                copied(samples(self.training, 4)[0]).square().mean().backward()
                self.keep("copy", copied.named_parameters())
            case "copy both":
                self.model, self.critic, self.optimizers = copy.deepcopy((self.model, self.critic, self.optimizers))
                self.wrap()
            case "regroup":
                for optimizer in self.optimizers:
                    groups = list(optimizer.param_groups)
                    optimizer.param_groups.clear()
                    for group in groups:
                        optimizer.add_param_group({**group, "params": list(group["params"])})
            case "init anew":
                self.side.init_anew()
                self.reload(everywhere=True)
            case "evaluate":
                self.model.eval()
                with torch.no_grad():
                    self.found["evaluation"] = self.model(samples(self.training, 4)[0])
                self.model.train()

    def reload(self, *, everywhere: bool) -> None:
        """Save everything, and go on with new objects that load it."""
        file = io.BytesIO()
        torch.save({"modules": [module.state_dict() for module in self.modules()],
                    "optimizers": [self.side.state(optimizer) for optimizer in self.optimizers],
                    "scheduler": self.scheduler and self.scheduler.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        self.build(self.side.seed + 1)
        if everywhere or self.side.loads:
            for module, state in zip(self.modules(), saved["modules"], strict=True):
                module.load_state_dict(state)
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        if not everywhere:
            self.side.begin(self.modules(), self.optimizers)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])

    def keep(self, what: str, named: Any) -> None:
        """Keep tensors to be compared."""
        for name, value in named:
            if isinstance(value, torch.Tensor):
                self.found[f"{what} {name}"] = value.detach().cpu().clone()

    def results(self) -> dict[str, torch.Tensor]:
        """Return everything that was found."""
        for what, module in (("model", self.model), ("critic", self.critic), ("average", self.average)):
            if module is not None:
                self.keep(what, module.state_dict().items())
        for number, optimizer in enumerate(self.optimizers):
            for index, state in self.side.state(optimizer)["state"].items():
                self.keep(f"state of optimizer {number}, parameter {index}:", state.items())
        if self.scaler.is_enabled():
            self.found["scale"] = torch.tensor(self.scaler.get_scale())
        return self.found


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
