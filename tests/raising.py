"""For programs that run as ranks, where pytest is not imported."""

from __future__ import annotations

from collections.abc import Callable


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], text: str, call: Callable[[], object]) -> None:
    """Fail unless a call raises an error of this kind whose text contains `text`."""
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind}")
