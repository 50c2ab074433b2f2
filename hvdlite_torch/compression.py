"""Gradient compression: a 16-bit copy of a gradient travels."""

from __future__ import annotations

import torch

from hvdlite.frontend.compression import BF16Compressor, Compression, Compressor, FP16Compressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "wire_dtype"]


def wire_dtype(compression: type[Compressor], dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which a compressor casts tensors of a dtype; None for one with methods of its own, a script's."""
    for method in ("compress", "decompress"):
        if getattr(getattr(compression, method), "__func__", None) is not getattr(Compressor, method).__func__:
            return None
    target = compression.target_for(str(dtype).removeprefix("torch."))
    return dtype if target is None else getattr(torch, target)
