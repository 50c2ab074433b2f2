"""Elastic training of a tiny PyTorch model by a schedule, as a script for Horovod."""

import horovod.torch as hvd
import torch

from tests.compat.programs.scheduled import Schedule

RATE = 0.001

hvd.init()
schedule = Schedule()
x, y = torch.randn(8, 2), torch.randint(2, (8,))
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), RATE * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def scale_learning_rate():
    for group in optimizer.param_groups:
        group["lr"] = RATE * hvd.size()


@hvd.elastic.run
def train(state):
    schedule.train(hvd, state, step)


state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, commits=0, worlds=0)
state.register_reset_callbacks([scale_learning_rate])
train(state)
assert optimizer.param_groups[0]["lr"] == RATE * hvd.size()
