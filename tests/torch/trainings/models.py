"""Models, data and losses of trainings, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.torch.trainings.draws import MIXED, Training

FEATURES, WORDS, OUTPUTS, WIDTH = 4, 7, 2, 20_000


class Squared(torch.autograd.Function):
    """x * x * scale, with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return 2 * x * scale * upstream, (x * x * upstream).sum()


class Model(nn.Module):
    """A model of any kind: rows of inputs to rows of outputs.

    Attributes:
        side: has a loss of its own, over parameters of its own; where the training has disjoint losses.
        extra: adds to the outputs; where the training adds a parameter group.
    """

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.kind = training.model
        self._build()
        self.head = nn.Linear(5, OUTPUTS)
        if self.kind == "tied":
            self.second = nn.Linear(FEATURES, 5)
            self.second.weight = self.first.weight
        if training.loss == "disjoint":
            self.side = nn.Linear(OUTPUTS, 1)
        if "add_param_group" in training.events.values():
            self.extra = nn.Linear(OUTPUTS, OUTPUTS)
            self.extra.requires_grad_(False)

    def _build(self) -> None:
        parametrizations = nn.utils.parametrizations
        self.first: Any = nn.Linear(FEATURES, 5)
        match self.kind:
            case "sync batch norm":
                self.first = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5))
            case "channels last":
                self.first = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 5, 2))
                self.first.to(memory_format=torch.channels_last)
            case "embedding" | "sparse embedding":
                self.first = nn.EmbeddingBag(WORDS, 5, sparse=self.kind == "sparse embedding")
            case "lstm":
                self.first = nn.LSTM(FEATURES, 5, batch_first=True)
            case "gru":
                self.first = nn.GRU(FEATURES, 5, batch_first=True)
            case "transformer":
                self.first = nn.Sequential(nn.TransformerEncoderLayer(FEATURES, 2, 6, 0.0, batch_first=True),
                                           nn.Linear(FEATURES, 5))
            case "unused":
                self.unused = nn.Linear(3, 3)
            case "frozen":
                self.first = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 5))
                self.first[0].requires_grad_(False)
            case "weight norm":
                self.first = parametrizations.weight_norm(self.first)
            case "spectral norm":
                self.first = parametrizations.spectral_norm(self.first)
            case "complex":
                self.factors = nn.Parameter(torch.randn(FEATURES, 5, dtype=torch.complex128))
            case "parameter list":
                self.factors = nn.ParameterList([nn.Parameter(torch.randn(FEATURES, 5)), nn.Parameter(torch.randn(5))])
                self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(()))})
                del self.first
            case "checkpoint" | "reentrant checkpoint" | "reentrant twice" | "all reentrant" | "layer twice":
                self.middle = nn.Linear(5, 5)
            case "bfloat16 part" | "float64 part" | "float32 gradients":
                self.middle = nn.Linear(5, 5)
            case "experts":
                self.first = nn.ModuleList([nn.Linear(FEATURES, 5), nn.Linear(FEATURES, 5), nn.Linear(FEATURES, 5)])
            case "custom function":
                self.scale = nn.Parameter(torch.randn(()))
            case "lazy":
                self.first = nn.LazyLinear(5)
            case "wide":  # gradients of more than half a MiB
                self.first = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))

    def typed(self, training: Training) -> Model:
        """Return the model in the dtypes and on the device it trains in."""
        dtype = getattr(torch, training.dtype)
        for parameter in (*self.parameters(), *self.buffers()):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        if self.kind in MIXED:
            self.middle.to(torch.float64 if self.kind == "float64 part" else torch.bfloat16)
        if self.kind == "float32 gradients":
            for parameter in self.middle.parameters():
                parameter.grad_dtype = torch.float32
        return self.to(training.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "all reentrant":
            outputs = checkpoint(lambda x: self.head(torch.tanh(self.middle(torch.tanh(self.first(x))))),
                                 x.requires_grad_(), use_reentrant=True)
        else:
            outputs = self.head(torch.tanh(self._hidden(x)))
        return outputs + self.extra(outputs) if hasattr(self, "extra") else outputs

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "channels last":
                return self.first(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))
            case "lstm" | "gru":
                return self.first(x)[0][:, -1]
            case "transformer":
                return self.first(x)[:, -1]
            case "tied":
                return self.first(x) + torch.sin(self.second(x))
            case "complex":
                return self.first(x) + (x.to(self.factors.dtype) @ self.factors).abs().to(x.dtype)
            case "parameter list":
                return x @ self.factors[0] + self.factors[1] * self.named["scale"]
            case "checkpoint":
                return checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=False)
            case "reentrant checkpoint":
                return checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=True)
            case "reentrant twice":
                hidden = checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=True)
                return checkpoint(self.middle, torch.tanh(hidden), use_reentrant=True)
            case "layer twice":
                return self.middle(torch.tanh(self.middle(self.first(x))))
            case "bfloat16 part" | "float64 part" | "float32 gradients":
                hidden = torch.tanh(self.first(x))
                return self.middle(hidden.to(self.middle.weight.dtype)).to(x.dtype)
            case "experts":  # a rank's rows may leave out some of them, and all ranks' may
                chosen = (x[:, 0] > 0).long() + (x[:, 0] > 0.8).long()
                hidden = x.new_zeros(len(x), 5)
                for index, expert in enumerate(self.first):
                    rows = torch.nonzero(chosen == index)[:, 0]
                    if len(rows):
                        hidden = hidden.index_put((rows,), expert(x[rows]).to(x.dtype))
                return hidden
            case "functional call":
                return torch.func.functional_call(self.first, dict(self.first.named_parameters()), (x,))
            case "custom function":
                return Squared.apply(self.first(x), self.scale)
        return self.first(x)


class Discriminator(nn.Module):
    """Tells targets from outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(OUTPUTS, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.layers(y)


def samples(training: Training, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(training.seed)
    shape: tuple[int, ...] = (rows, FEATURES)
    if training.model in ("sync batch norm", "channels last"):
        shape = (rows, 2, 3, 3)
    if training.model in ("lstm", "gru", "transformer"):
        shape = (rows, 3, FEATURES)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, training.dtype))
    if "embedding" in training.model:
        x = torch.randint(0, WORDS, (rows, 3), generator=generator)
    y = torch.randn(rows, OUTPUTS, generator=generator, dtype=torch.float64).to(getattr(torch, training.dtype))
    return x.to(training.device), y.to(training.device)


def losses(training: Training, model: Model, x: torch.Tensor, y: torch.Tensor, *, at: Any = None) -> list[torch.Tensor]:
    """Return means over the rows that add up to the loss; several where they are disjoint.

    Args:
        at: applies the model; the model itself by default.
    """
    if training.loss == "penalty":
        x = x.detach().requires_grad_()
    outputs = (at or model)(x)
    match training.loss:
        case "huber":
            loss = functional.huber_loss(outputs, y)
        case "cross entropy":
            loss = functional.cross_entropy(outputs, y.argmax(1))
        case "weighted":
            loss = ((0.5 + (y > 0)) * (outputs - y).square()).mean()
        case "penalty":
            slope, = torch.autograd.grad(outputs.sum(), x, create_graph=True)
            loss = functional.mse_loss(outputs, y) + 0.3 * slope.square().mean()
        case _:
            loss = functional.mse_loss(outputs, y)
    return [loss, model.side(y).square().mean()] if training.loss == "disjoint" else [loss]
