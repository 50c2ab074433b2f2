"""Spans of operations for `torch.profiler`, from the call to its end, like those of torch's own backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function

from hvdlite.groups.call import Call


def begin_span(what: str) -> Callable[[Call], None]:
    """Begin a span on this thread, which is profiled; return what ends it, on any thread.

    Args:
        what: the call, as errors show it: "all_reduce(SUM, float32[10])". The span has its name.
    """
    ended: Any = torch.futures.Future()
    with record_function(f"hvdlite:{what.partition('(')[0]}") as span:
        span._call_end_callbacks_on_future(ended)  # other threads have no profiler; the future takes this one's along
    return lambda call: ended.set_result(None)
