"""What `torch.profiler`, `torch.compile` and `CommDebugMode` see of calls: the same as of torch's own process groups."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hvdlite.groups.call import Call


def begin_span(what: str) -> Callable[[Call], None]:
    """Begin a span of `torch.profiler` on this thread, which is profiled; return what ends it, on any thread.

    Args:
        what: the call, as errors show it: "all_reduce(SUM, float32[10])". The span has its name.
    """
    ended: Any = torch.futures.Future()
    with record_function(f"hvdlite:{what.partition('(')[0]}") as span:
        span._call_end_callbacks_on_future(ended)  # other threads have no profiler; the future takes this one's along
    return lambda call: ended.set_result(None)


class _CountedOperator:
    """Stands for an operator that has been called already."""

    def __init__(self, operator: Any) -> None:
        self._overloadpacket = operator

    def __call__(self) -> None:
        """Do nothing."""

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def count(name: str) -> None:
    """Count a call in each `CommDebugMode` that is on: it sees what passes torch's dispatcher, and our methods do not.

    Args:
        name: torch's old name of the method, which its operators have, some with "_".
    """
    module: Any = sys.modules.get("torch.distributed.tensor.debug._comm_mode")
    operators = torch.ops.c10d
    operator = getattr(operators, f"{name}_", None) or getattr(operators, name, None)
    for mode in _get_current_dispatch_mode_stack() if module is not None and operator is not None else ():
        if isinstance(mode, module.CommDebugMode):
            mode.__torch_dispatch__(_CountedOperator(operator), ())
