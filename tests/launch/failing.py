"""A job whose rank 1 fails first, which every way to call a function on ranks runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdlite.launch.run_function import RankTraceback


def check_first_exception(run: Callable[[Callable[[], None]], object]) -> None:
    """Fail unless `run` raises the exception of the rank that failed first, with its traceback."""
    def fail() -> None:
        import hvdlite as hvd
        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("bad batch")
        hvd.barrier()

    with pytest.raises(KeyError, match="bad batch") as caught:
        run(fail)
    assert isinstance(caught.value.__cause__, RankTraceback)
    told = str(caught.value.__cause__)  # cloudpickle 3.1.3 replaces the file of a function that is pickled with its code
    assert "on rank 1" in told and "in fail" in told
    assert 'raise KeyError("bad batch")' in told or "<dynamic-code>" in told
