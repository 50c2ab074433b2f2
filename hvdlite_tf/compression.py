"""Gradient compression: a 16-bit copy of a gradient travels. Other backends use `target` only, without TensorFlow."""

from __future__ import annotations

from typing import Any

from hvdlite.training.compression import compresses


class Compressor:
    """No compression; base of the others. `compress` and `decompress` are each other's inverse up to rounding."""

    target: str | None = None

    @classmethod
    def target_for(cls, dtype: str) -> str | None:
        """Return the dtype in which a tensor of `dtype` travels; None when it travels as it is."""
        return cls.target if compresses(cls.target, dtype) else None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return what of a TensorFlow tensor travels, maybe itself, and the context `decompress` needs."""
        target = cls.target_for(tensor.dtype.name)
        if target is None:
            return tensor, None
        import tensorflow as tf
        return tf.cast(tensor, target), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        """Return `tensor` in its original dtype."""
        if context is None:
            return tensor
        import tensorflow as tf
        return tf.cast(tensor, context)


class FP16Compressor(Compressor):
    """Floats wider than 16 bits travel as float16 (summed in float32)."""

    target = "float16"


class BF16Compressor(Compressor):
    """Floats wider than 16 bits travel as bfloat16 (summed in float32)."""

    target = "bfloat16"


class Compression:
    """The choices for `compression=` arguments."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
