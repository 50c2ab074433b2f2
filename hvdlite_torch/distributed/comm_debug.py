"""Counts of calls for torch's `CommDebugMode`, which sees what passes torch's dispatcher: our process groups do not."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class _Seen:
    """Stands for an operator that has been called already."""

    def __init__(self, operator: Any) -> None:
        self._overloadpacket = operator

    def __call__(self) -> None:
        """Do nothing."""

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def count(name: str) -> None:
    """Count a call of a process group's method in each `CommDebugMode` that is on.

    Args:
        name: torch's old name of the method, which its operators have, some with "_".
    """
    module: Any = sys.modules.get("torch.distributed.tensor.debug._comm_mode")
    operators = torch.ops.c10d
    operator = getattr(operators, f"{name}_", None) or getattr(operators, name, None)
    for mode in _get_current_dispatch_mode_stack() if module is not None and operator is not None else ():
        if isinstance(mode, module.CommDebugMode):
            mode.__torch_dispatch__(_Seen(operator), ())
