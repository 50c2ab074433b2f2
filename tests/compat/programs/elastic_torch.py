"""Elastic training as Horovod's documentation has it for PyTorch, until a file exists."""

import os
import sys

import horovod.torch as hvd
import torch

gate = sys.argv[1]
hvd.init()
torch.manual_seed(hvd.rank())
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} trains in process {os.getpid()} from epoch {state.epoch}", flush=True)
    while True:
        for batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            sampler.record_batch(batch, len(x))
            state.batch = batch
            if batch % 4 == 0:
                state.commit()
        state.epoch += 1
        state.batch = 0
        sampler.set_epoch(state.epoch)
        if hvd.broadcast_object(os.path.exists(gate), root_rank=0):
            return state.epoch
        state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
assert train(state) == state.epoch
weights = hvd.allgather_object(model.weight.flatten().tolist())
assert all(each == weights[0] for each in weights), weights
assert optimizer.param_groups[0]["lr"] == 0.01 * hvd.size()
print(f"done with {hvd.size()}")
