"""The choice of gradients that are compressed on the wire; adapters do the casts."""

from __future__ import annotations

_WIDE_FLOATS = frozenset({"float32", "float64"})


def compresses(target: str | None, dtype: str) -> bool:
    """Return whether a tensor of `dtype` is sent as `target` ("float16", "bfloat16", None for not at all).

    Only floats wider than 16 bits are: integers would lose their meaning, 16-bit floats gain nothing.
    """
    return target is not None and dtype in _WIDE_FLOATS
