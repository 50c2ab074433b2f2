"""The arguments that all frontends' distributed optimizers and tapes have in common, and their checks."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

from hvdlite.core.types import ReduceOp

WRAPPED = ("this optimizer is distributed already: use it as it is (what is made in the scope of a MirroredStrategy is "
           "distributed at once)")
"""The error text for an optimizer that is wrapped a second time."""

_WIDE_FLOATS = frozenset({"float32", "float64"})


def factors(op: ReduceOp, gradient_predivide_factor: float) -> tuple[float, float]:
    """Return the factors before and after the reduction: an average may divide before the sum, against overflow.

    Raises:
        ValueError: for a factor that is not positive, and for another op than Average with one that is not 1.
    """
    if gradient_predivide_factor <= 0:
        raise ValueError(f"gradient_predivide_factor must be positive, not {gradient_predivide_factor}")
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average, "
                         f"not {op.name.capitalize()}")
    return 1.0 / gradient_predivide_factor, gradient_predivide_factor


def check_passes(backward_passes_per_step: object) -> None:
    """Raise `ValueError` unless backward passes are counted by a whole number from 1."""
    if not isinstance(backward_passes_per_step, numbers.Integral) or backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be a whole number, at least 1, not {backward_passes_per_step!r}")


def check_compression(compression: Any) -> None:
    """Raise `ValueError` for an object that is not a compressor."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(f"compression must be hvd.Compression.none, .fp16 or .bf16, not {compression!r}")


def compresses(target: str | None, dtype: str) -> bool:
    """Return whether a tensor of `dtype` is sent as `target` ("float16", "bfloat16", None for not at all).

    Only floats wider than 16 bits are: integers would lose their meaning, 16-bit floats gain nothing.
    """
    return target is not None and dtype in _WIDE_FLOATS


def chosen_groups(groups: Any, num_groups: int) -> Any:
    """Return `groups`, or its deprecated alias `num_groups`."""
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=3)
    return groups if groups is not None else num_groups or None


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
