"""`MirroredStrategy` for PyTorch: one replica of the model per rank."""

from hvdlite_torch.mirrored.mirrored_strategy import MirroredStrategy

__all__ = ["MirroredStrategy"]
