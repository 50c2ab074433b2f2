"""The `groups` argument of every `DistributedOptimizer`: gradients that are reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def group_ids(groups: object, parameters: Sequence[Any]) -> dict[int, int]:
    """Return the id, from 1, of the group of each parameter that is in one; by the parameter's `id`.

    Args:
        groups: None; the number of groups of about equally many neighbours; or a list of lists of parameters.
        parameters: all of them, in the order of the model.

    Raises:
        ValueError: for anything else, and for a parameter in two groups.
    """
    if groups is None:
        return {}
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        share, more = divmod(len(parameters), groups)
        sizes = [share + (index < more) for index in range(groups)]
        group_ids = [group_id for group_id, size in enumerate(sizes, 1) for _ in range(size)]
        return {id(parameter): group_id for parameter, group_id in zip(parameters, group_ids, strict=True)}
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(f"groups must be a positive number, or a list of lists of parameters, not {groups!r}")
    found: dict[int, int] = {}
    for group_id, group in enumerate(groups, 1):
        for parameter in group:
            if not hasattr(parameter, "shape"):
                raise ValueError(f"groups must hold parameters, not {type(parameter).__name__}")
            if id(parameter) in found:
                raise ValueError(f"a parameter of shape {list(parameter.shape)} is in groups more than once")
            found[id(parameter)] = group_id
    return found
