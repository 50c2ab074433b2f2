"""The arguments that all frontends' distributed optimizers and tapes have in common, and their checks."""

from __future__ import annotations

import numbers
import warnings
from typing import Any

from hvdlite.core.types import ReduceOp

WRAPPED = ("this optimizer is distributed already: use it as it is (what is made in the scope of a MirroredStrategy is "
           "distributed at once)")
"""The error text for an optimizer that is wrapped a second time."""


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


def chosen_groups(groups: Any, num_groups: int) -> Any:
    """Return `groups`, or its deprecated alias `num_groups`."""
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=3)
    return groups if groups is not None else num_groups or None
