"""Counts of calls for torch's `CommDebugMode`, which sees what passes torch's dispatcher: our process groups do not."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["count", "modes"]


class _Seen:
    """Stands for an operator that has been called already.

    Args:
        name: the operator's in `torch.ops.c10d`.
    """

    def __init__(self, name: str) -> None:
        self._overloadpacket: Any = getattr(torch.ops.c10d, name, None)
        self._text = f"c10d.{name}.default"

    def __call__(self) -> None:
        """Do nothing."""

    def __str__(self) -> str:
        return self._text


def count(name: str) -> None:
    """Count a call of a process group's method in each `CommDebugMode` that is on; called where there are `modes()`.

    Args:
        name: torch's old name of the method, which its operators have.
    """
    module: Any = sys.modules.get("torch.distributed.tensor.debug._comm_mode")
    for mode in _get_current_dispatch_mode_stack() if module is not None else ():
        if isinstance(mode, module.CommDebugMode):
            mode.__torch_dispatch__(_Seen(f"{name}_"), ())
