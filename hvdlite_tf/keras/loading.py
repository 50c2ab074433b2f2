"""Batches of a PyDataset, loaded ahead of time by the workers that it asks for.

Keras' own loader passes preloaded batches from one iteration to the next. In a scope, Keras begins an iteration to build the
model and drops it after one batch; the preloaded batches then depend on timing, and ranks would get different ones. Here
batches are identified by index, so a dropped iteration has no effect on others.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

ENDLESS = range(sys.maxsize)
"""Indices of the batches of a PyDataset without a length."""
_in_worker: Any = None  # the dataset, in a worker process


class Loading:
    """Loads the batches of one PyDataset.

    Args:
        dataset: its `workers`, `use_multiprocessing` and `max_queue_size` have Keras' meaning.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        has_workers = dataset.workers > 1 or (dataset.workers > 0 and dataset.use_multiprocessing)
        self._workers = dataset.workers if has_workers else 0
        self._lock = threading.RLock()
        self._executor: Executor | None = None
        self._asked: dict[int, Future[Any]] = {}  # by position
        self._next = 0  # next position to load

    def batch(self, position: int, batch_indices: Sequence[int]) -> Any:
        """Return one batch, and load those at the following positions in the background.

        Args:
            position: the batch's, in `batch_indices`.
            batch_indices: in the order in which batches are needed.
        """
        if self._workers == 0:
            return self._dataset[int(batch_indices[position])]
        with self._lock:
            if position not in self._asked:
                self.stop()
                self._next = position
            while self._next < len(batch_indices) and len(self._asked) < max(1, self._dataset.max_queue_size):
                self._asked[self._next] = self._submit(int(batch_indices[self._next]))
                self._next += 1
            future = self._asked.pop(position)
        return future.result()

    def stop(self) -> None:
        """Discard preloaded batches: the dataset changes, or no more batches are needed."""
        with self._lock:
            self._asked.clear()
            if self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)
                self._executor = None

    def _submit(self, batch_index: int) -> Future[Any]:
        if self._dataset.use_multiprocessing:
            self._executor = self._executor or ProcessPoolExecutor(self._workers, initializer=_begin,
                                                                   initargs=(self._dataset,))
            return self._executor.submit(_load, batch_index)
        self._executor = self._executor or ThreadPoolExecutor(self._workers)
        return self._executor.submit(self._dataset.__getitem__, batch_index)


def _begin(dataset: Any) -> None:
    global _in_worker
    _in_worker = dataset


def _load(batch_index: int) -> Any:
    return _in_worker[batch_index]
