"""`DistributedOptimizer`: the user's optimizer, with gradients that are reduced when `backward()` returns."""

from hvdlite.training.outer.settings import DiLoCo, LocalSGD
from hvdlite_torch.optimizer.base import is_distributed
from hvdlite_torch.optimizer.distributed import Distributed
from hvdlite_torch.optimizer.distributed_optimizer import DistributedOptimizer

__all__ = ["DiLoCo", "Distributed", "DistributedOptimizer", "LocalSGD", "is_distributed"]
