"""The states of torch's generators: the CPU's, and that of the current CUDA device."""

from __future__ import annotations

import torch

TorchRandomStates = tuple[torch.Tensor, "torch.Tensor | None"]


def torch_random_states() -> TorchRandomStates:
    """Return copies of the states; None for a GPU that is not in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def load_torch_random_states(states: TorchRandomStates) -> None:
    """Go back to states, which stay as they are."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])
