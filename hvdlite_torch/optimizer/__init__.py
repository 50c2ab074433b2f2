"""`DistributedOptimizer`: the user's optimizer, with gradients that are reduced when `backward()` returns."""

from hvdlite_torch.optimizer.distributed_optimizer import Distributed, DistributedOptimizer, is_distributed

__all__ = ["Distributed", "DistributedOptimizer", "is_distributed"]
