"""How `torch.compile` treats the methods of process groups: it calls them, like torch's own, and does not look inside.

A compiled graph contains functional collectives, which torch makes of `torch.distributed`'s functions. A method of a process
group is called where the compiler has left a function to Python.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch._C._dynamo import eval_frame


def leave_to_python(function: Any) -> None:
    """Mark a function that is never compiled, nor what it calls; without importing the compiler."""
    assert isinstance(function, FunctionType)
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, "it communicates"
    skipped = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skipped, skipped))
