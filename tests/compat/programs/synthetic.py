"""Horovod's synthetic benchmark."""

import timeit

import horovod.torch as hvd
import numpy as np
import torch

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), groups=2,
                                     backward_passes_per_step=2)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.randn(32, 64), torch.randn(32, 64)

def benchmark_step():
    optimizer.zero_grad()
    for _ in range(2):
        torch.nn.functional.mse_loss(model(data), target).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()

timeit.timeit(benchmark_step, number=2)
rates = [32 * 5 / timeit.timeit(benchmark_step, number=5) for _ in range(3)]
mean, conf = np.mean(rates), 1.96 * np.std(rates)
if hvd.rank() == 0:
    print("Total img/sec on %d ranks: %.1f +-%.1f" % (hvd.size(), hvd.size() * mean, hvd.size() * conf))  # noqa: UP031
print("done")
