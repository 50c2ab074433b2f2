"""Communication hooks: PowerSGD, or torch's own hooks, instead of an allreduce, for `DistributedOptimizer(comm_hook=)`.

A hook gets all gradients of a step after backward and averages them in place, with the methods of `Exchange`. Hooks trade
accuracy and overlap for bytes: they pay off on slow networks only.
"""

from hvdlite_torch.comm_hooks.ddp_hook import DDPHook
from hvdlite_torch.comm_hooks.exchange import AllReduce, CommHook, Exchange, Gradients
from hvdlite_torch.comm_hooks.power_sgd import PowerSGD

__all__ = ["AllReduce", "CommHook", "DDPHook", "Exchange", "Gradients", "PowerSGD"]
