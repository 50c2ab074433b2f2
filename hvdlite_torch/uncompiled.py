"""Functions of ours into which `torch.compile` does not look."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

from hvdlite import boundaries, ops

F = TypeVar("F")


def leave_to_python(function: F) -> F:
    """Mark a function that compiled code calls, or that autograd calls in the middle of it, and return it.

    The compiler neither traces it nor what it calls. Unlike `torch.compiler.disable` this wraps nothing, so calls cost no
    more than before, and does not import the compiler, which takes a second.
    """
    assert isinstance(function, FunctionType)
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg="it communicates")
    if hasattr(eval_frame, "set_code_exec_strategy"):  # torch 2.8 and later
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function  # type: ignore[return-value]


def leave_module_to_python(module: Mapping[str, Any]) -> None:
    """Mark the public functions of a module, whose names are given, and those of its `autograd.Function`s; at its end."""
    for name, value in module.items():
        if getattr(value, "__module__", None) != module["__name__"]:
            continue
        if isinstance(value, FunctionType) and not name.startswith("_"):
            leave_to_python(value)
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
            for each in vars(value).values():
                if isinstance(each, staticmethod):
                    leave_to_python(each.__func__)


for _function in (ops.barrier, ops.join, boundaries.stop_requested):
    leave_to_python(_function)
