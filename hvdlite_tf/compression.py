"""Gradient compression: a 16-bit copy of a gradient travels."""

from hvdlite.frontend.compression import BF16Compressor, Compression, Compressor, FP16Compressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor"]
