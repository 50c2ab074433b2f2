"""Gradient compression: a 16-bit copy of a gradient travels. The compressors are the same for torch and TensorFlow."""

from __future__ import annotations

from typing import Any

from hvdlite.training.arguments import compresses


class Compressor:
    """No compression; base class of the compressors. `decompress` is the inverse of `compress` up to rounding."""

    target: str | None = None

    @classmethod
    def target_for(cls, dtype: str) -> str | None:
        """Return the dtype on the wire of a tensor of `dtype`; None when it is sent unchanged."""
        return cls.target if compresses(cls.target, dtype) else None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, which may be `tensor` itself, and the context for `decompress`."""
        target = cls.target and cls.target_for(str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch."))
        return (tensor, None) if target is None else (_cast(tensor, target), tensor.dtype)

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        """Return `tensor` in its original dtype."""
        return tensor if context is None else _cast(tensor, context)


class FP16Compressor(Compressor):
    """Sends floats wider than 16 bits as float16 (summed in float32)."""

    target = "float16"


class BF16Compressor(Compressor):
    """Sends floats wider than 16 bits as bfloat16 (summed in float32)."""

    target = "bfloat16"


class Compression:
    """The choices for `compression=` arguments."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _cast(tensor: Any, dtype: Any) -> Any:
    """Return a tensor in another dtype, which is given by its name, or as the framework's own."""
    if hasattr(tensor, "to"):
        import torch
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    import tensorflow as tf
    return tf.cast(tensor, dtype)
