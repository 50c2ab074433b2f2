"""`DistributedOptimizer`: the user's optimizer, with gradients that are reduced when `backward()` returns."""

from hvdlite_torch.optimizer.base import is_distributed
from hvdlite_torch.optimizer.distributed_optimizer import Distributed, DistributedOptimizer

__all__ = ["Distributed", "DistributedOptimizer", "is_distributed"]
