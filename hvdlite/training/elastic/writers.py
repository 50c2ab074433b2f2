"""Writers, such as checkpoint callbacks, that a script makes on rank 0 only before `run`: they end with its process."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection
from typing import Any, Final

_MOST: Final = 1000
"""Containers with more entries are data."""


def names_of_writers(kinds: tuple[type, ...], func: Callable[..., Any], *given: Any) -> list[str]:
    """Return the names of the classes of writers that a function is going to find, and does not make itself.

    These are its arguments and the variables around it to which it refers, and what lists, tuples, sets and dicts among
    them contain.

    Args:
        kinds: the classes of writers.
        given: the function's arguments.
    """
    try:
        around = inspect.getclosurevars(inspect.unwrap(func))
        values = [*given, *around.nonlocals.values(), *around.globals.values()]
    except (TypeError, ValueError):  # no function of Python, or a variable without a value yet
        values = list(given)
    for value in tuple(values):
        if issubclass(type(value), (list, tuple, set, dict)) and len(value) <= _MOST:
            values += value.values() if issubclass(type(value), dict) else value
    return sorted({type(value).__name__ for value in values if issubclass(type(value), kinds)})


def warn_of_writers(root: Collection[str], own: Collection[str]) -> None:
    """Warn of writers that rank 0 has and this rank lacks, which becomes rank 0 if that one is lost.

    Args:
        root, own: from `names_of_writers`.
    """
    for name in root:
        if name not in own:
            warnings.warn(f"rank 0 has a {name} that was made before hvd.elastic.run, and rank 1 has none: when the process "
                          f"that is rank 0 ends, nothing is written any more. Make the {name} in the function that "
                          "hvd.elastic.run calls, or make it on all ranks and let it ask hvd.rank() == 0", stacklevel=2)
