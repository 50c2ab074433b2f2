"""How long a script waits for the batches of torch's loaders; counted in the rank's ledger."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

from torch.utils.data import dataloader

from hvdlite import api


def count_input() -> None:
    """Count the time in which any `DataLoader` of this process waits for a batch, from now on; again changes nothing.

    A loader whose data set reads another loader counts once.
    """
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    next_batch = getattr(base, "__next__", None)
    if base is None or next_batch is None or hasattr(next_batch, "counts_for_hvdlite"):
        return  # another torch: then this time is part of what is not known

    loading = threading.local()

    @functools.wraps(next_batch)
    def counted(self: Any) -> Any:
        if getattr(loading, "is_nested", False):
            return next_batch(self)
        loading.is_nested = True
        begun, cpu = time.perf_counter(), time.thread_time()
        try:
            return next_batch(self)
        finally:
            loading.is_nested = False
            if api.is_initialized() and not api.is_provisional():
                api.runtime().progress.loaded(time.perf_counter() - begun, time.thread_time() - cpu)

    counted.counts_for_hvdlite = True  # type: ignore[attr-defined]
    base.__next__ = counted
