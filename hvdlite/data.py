"""Data loaders with Horovod's interface (`horovod.data`): a base class, and a mixin that loads in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any


class BaseDataLoader:
    """Iterates over batches; subclasses implement `__len__` and `_iterate`."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of one epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Yield the processed batches of one epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return a processed batch; subclasses may override this."""
        return batch


class _End:
    """Marks the end of an epoch in the queue, with the error that ended it, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class AsyncDataLoaderMixin:
    """Put before a `BaseDataLoader`: a thread loads batches ahead.

    Args:
        async_loader_queue_size: batches loaded ahead; 0 loads in the calling thread.
        debug_data_loader: accepted for Horovod's sake.
        rest: for the data loader's own constructor.
    """

    def __init__(self, async_loader_queue_size: int = 64, *rest: Any, debug_data_loader: bool = False, **named: Any) -> None:
        del debug_data_loader
        self._ahead = async_loader_queue_size
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        super().__init__(*rest, **named)

    def close_async_loader(self) -> None:
        """Stop loading ahead, and wait for the thread."""
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            self._thread.join()
        self._stop = self._thread = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the processed batches of one epoch; what the loading thread raises is raised here."""
        if self._ahead <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        self.close_async_loader()
        batches: queue.Queue[Any] = queue.Queue(self._ahead)
        self._stop = stop = threading.Event()
        self._thread = threading.Thread(target=self._load, args=(batches, stop), name="hvdlite-loader", daemon=True)
        self._thread.start()
        try:
            while True:
                batch = batches.get()
                if isinstance(batch, _End):
                    if batch.error is not None:
                        raise batch.error
                    return
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            self.close_async_loader()

    def _load(self, batches: queue.Queue[Any], stop: threading.Event) -> None:
        error: BaseException | None = None
        try:
            for batch in self._iterate():  # type: ignore[attr-defined]
                if not _put(batches, batch, stop):
                    return
        except BaseException as raised:  # it is raised in the iterating thread
            error = raised
        _put(batches, _End(error), stop)


def _put(batches: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Wait for space in the queue; return False when loading is stopped."""
    while not stop.is_set():
        try:
            batches.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
