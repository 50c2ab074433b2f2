"""Moments of several ranks' values are those of all values together."""

from __future__ import annotations

import numpy as np

from hvdlite.training.moments import combined_moments


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = np.random.default_rng(0).normal(1e6, 1.0, (9, 3))
    parts = [values[:4], values[4:4], values[4:]]
    means = np.stack([part.mean(0) if len(part) else np.zeros(3) for part in parts])
    squares = np.stack([np.square(part - mean).sum(0) for part, mean in zip(parts, means, strict=True)])
    count, mean, variance = combined_moments(np.array([[4.0], [0.0], [5.0]]), means, squares)
    assert count == 9
    np.testing.assert_allclose(mean, values.mean(0), rtol=1e-12)
    np.testing.assert_allclose(variance, values.var(0), rtol=1e-9)


def test_no_values_have_zeros() -> None:
    nothing = np.zeros((2, 3))
    for moment in combined_moments(nothing, nothing, nothing):
        assert (moment == 0).all()
