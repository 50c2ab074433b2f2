"""Where a rank's number of samples is found."""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from typing import Any

from hvdlite.training.step_reducer import current_weight, weighing
from tests.worlds import HANGS_SECONDS


def found_in(start: Callable[[Callable[[], None]], Any]) -> Any:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    start(lambda: found.put(current_weight()))
    return found.get(timeout=HANGS_SECONDS)


def own(call: Callable[[], None]) -> None:
    threading.Thread(target=call).start()


def foreign(call: Callable[[], None]) -> None:
    _thread.start_new_thread(call, ())


def test_torchs_thread_for_a_gpu_finds_the_samples_of_the_step_and_other_threads_do_not() -> None:
    assert found_in(foreign) is None
    with weighing(3):
        assert current_weight() == found_in(foreign) == 3
        with weighing(5):
            assert current_weight() == found_in(foreign) == 5
        assert current_weight() == found_in(foreign) == 3
        assert found_in(own) is None
        with weighing(None):
            assert found_in(foreign) is None
    assert found_in(foreign) is None
