"""Gradient compression: a 16-bit copy of a gradient travels."""

from __future__ import annotations

import torch

from hvdlite.training.arguments import compresses


class Compressor:
    """No compression; base of the others. `compress` and `decompress` are each other's inverse up to rounding."""

    target: torch.dtype | None = None

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return what travels, and the context `decompress` needs; `tensor` itself when nothing is to be done."""
        target = cls.target
        if target is None or not compresses(str(target), str(tensor.dtype).removeprefix("torch.")):
            return tensor, None
        return tensor.to(target), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
        """Return `tensor` in its original dtype."""
        return tensor if context is None else tensor.to(context)


def wire_dtype(compression: type[Compressor], dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which a compressor casts tensors of a dtype; None for one with methods of its own, a script's."""
    for method in ("compress", "decompress"):
        if getattr(getattr(compression, method), "__func__", None) is not getattr(Compressor, method).__func__:
            return None
    is_compressed = compresses(str(compression.target), str(dtype).removeprefix("torch."))
    return compression.target if compression.target is not None and is_compressed else dtype


class FP16Compressor(Compressor):
    """Floats wider than 16 bits travel as float16 (summed in float32)."""

    target = torch.float16


class BF16Compressor(Compressor):
    """Floats wider than 16 bits travel as bfloat16 (summed in float32)."""

    target = torch.bfloat16


class Compression:
    """The choices for `compression=` arguments."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
