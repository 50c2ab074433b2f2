"""Optimizers and schedulers of trainings, by the names that are drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import lr_scheduler


def optimizer(name: str, parameters: list[Any], rate: float) -> torch.optim.Optimizer:
    """Return a new optimizer. Epsilons are large, so that a rounding error stays one."""
    match name:
        case "SGD":
            return torch.optim.SGD(parameters, lr=rate)
        case "momentum" | "nesterov":
            return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=0.05, nesterov=name == "nesterov")
        case "Adam" | "amsgrad":
            return torch.optim.Adam(parameters, lr=rate, eps=1e-2, amsgrad=name == "amsgrad", weight_decay=0.05)
        case "AdamW foreach" | "AdamW fused":
            return torch.optim.AdamW(parameters, lr=rate, eps=1e-2, weight_decay=0.1,
                                     **{name.removeprefix("AdamW "): True})
        case "RMSprop":
            return torch.optim.RMSprop(parameters, lr=rate, eps=1e-2, momentum=0.5, centered=True)
        case "LBFGS" | "LBFGS strong_wolfe":
            return torch.optim.LBFGS(parameters, lr=rate, max_iter=3, history_size=4, tolerance_grad=0,
                                     tolerance_change=0,
                                     line_search_fn="strong_wolfe" if name.endswith("wolfe") else None)
    return getattr(torch.optim, name)(parameters, lr=rate, eps=1e-2)


def scheduler(name: str, optimizer: torch.optim.Optimizer, total: int) -> Any:
    """Return a scheduler of an optimizer.

    Args:
        total: the number of steps.
    """
    has_momentum = "betas" in optimizer.defaults or optimizer.defaults.get("momentum", 0) > 0
    match name:
        case "OneCycleLR":
            return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total + 1,
                                            cycle_momentum=has_momentum)
        case "SequentialLR":
            parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.8)]
            return lr_scheduler.SequentialLR(optimizer, parts, [2])
        case "ReduceLROnPlateau":
            return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    return lr_scheduler.StepLR(optimizer, 2, 0.5)
