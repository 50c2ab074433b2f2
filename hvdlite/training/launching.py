"""Starting ranks from inside a script, for strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite import api
from hvdlite.run_function import run


def launch(main: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, devices: int | None) -> Any:
    """Call `main` on so many new ranks, and return what rank 0's call returned.

    When this process is one of several ranks already, and when no number of ranks is given, `main` is only called here.
    """
    if devices is None or devices == 1 or api.runtime().world.size > 1:
        return main(*args, **(kwargs or {}))
    return run(main, args, kwargs, np=devices)[0]
