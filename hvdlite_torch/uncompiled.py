"""Functions of ours into which `torch.compile` does not look."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

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
    """Mark the public functions of a module, whose names are given, at its end."""
    for name, value in module.items():
        if not name.startswith("_") and isinstance(value, FunctionType) and value.__module__ == module["__name__"]:
            leave_to_python(value)
