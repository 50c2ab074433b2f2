"""PyTorch's objects in checkpoints: `hvd.save` and `hvd.load` (docs/checkpoints.md)."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.checkpoints import kinds, load, save
from hvdlite_torch.arrays.tensors import host_tensor, on_host
from hvdlite_torch.collectives.broadcasts import load_exactly
from hvdlite_torch.optimizer.outer import has_workers
from hvdlite_torch.optimizer.sharded import Sharded

__all__ = ["load", "save"]


_OPTIMIZER = "hvdlite.optimizer"
"""In the state of an optimizer: its class, and the shapes of its parameters."""


class TorchKind(kinds.Kind):
    """Modules, optimizers and tensors."""

    name, order = "torch", 1

    def owns(self, value: Any) -> bool:
        return isinstance(value, (torch.nn.Module, torch.Tensor, torch.optim.Optimizer))

    def gather(self, value: Any) -> None:
        if isinstance(value, Sharded):
            value.consolidate_state_dict(to=None)
        if has_workers(value):
            raise UnsupportedError("hvd.save divides state that is the same on all ranks, and with outer= each worker has "
                                   "its own: save optimizer.state_dict() and the model on each rank with torch.save")

    def state_of(self, value: Any) -> Any:
        state = super().state_of(value)
        return {**state, _OPTIMIZER: _kind_of(value)} if isinstance(value, torch.optim.Optimizer) else state

    def array_of(self, leaf: Any) -> Array | None:
        return on_host(leaf, "a tensor") if isinstance(leaf, torch.Tensor) else None

    def tensor_of(self, array: Array) -> torch.Tensor:
        return host_tensor(array)

    def check(self, name: str, value: Any, state: Any) -> bool:
        if isinstance(value, torch.optim.Optimizer):
            own: Any = {"param_groups": value.param_groups, _OPTIMIZER: _kind_of(value)}
        else:
            own = value if isinstance(value, torch.Tensor) else self.state_of(value)
        kinds.refuse_other(name, *(_described(each) for each in (own, state)))
        return True

    def load(self, value: Any, state: Any) -> bool:
        if isinstance(value, torch.optim.Optimizer):
            load_exactly(value, {key: each for key, each in state.items() if key != _OPTIMIZER})
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(state)
        else:
            value.load_state_dict(state)
        return True

    def random_states(self) -> dict[str, Any]:
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None}

    def set_random_states(self, states: dict[str, Any]) -> None:
        torch.set_rng_state(states["cpu"])
        if states["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def _kind_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [type(optimizer).__name__,
            [list(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]]


def _described(state: Any) -> list[tuple[str, Any, Any]]:
    """Return what must be the same to load a state: of an optimizer its class and parameters, otherwise its tensors."""
    if isinstance(state, dict) and _OPTIMIZER in state:
        kind, shapes = state[_OPTIMIZER]
        groups = [(f"group {index}", (len(group["params"]),), "parameters")
                  for index, group in enumerate(state["param_groups"])]
        parameters = [(f"parameter {index}", shape, "of shape") for index, shape in enumerate(shapes)]
        return [("it", (), kind), *groups, *parameters]
    named = state if isinstance(state, dict) else {"it": state}
    return [(key, tuple(each.shape), each.dtype) for key, each in named.items() if isinstance(each, torch.Tensor)]


kinds.add(TorchKind())
