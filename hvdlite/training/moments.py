"""Mean and variance over the batches of all ranks."""

from __future__ import annotations

from typing import Any


def combined_moments(counts: Any, means: Any, squares: Any) -> tuple[Any, Any, Any]:
    """Return count, mean and variance of the values of all ranks, given those of each rank along the first dimension.

    The formula is exact for ranks with different counts, and keeps a small variance beside a large mean (Chan, Golub and
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979). Without values, mean and
    variance are 0.

    Args:
        counts: a NumPy array or a torch tensor of floats, as are all arguments and results.
        means: of each rank's values.
        squares: sums of squares about the rank's own mean.
    """
    count = counts.sum(0)
    divisor = count + (count == 0)
    mean = (counts * means).sum(0) / divisor
    return count, mean, (squares + counts * (means - mean) ** 2).sum(0) / divisor
