"""Trains without end, with DataLoader workers."""

import os

print("pid", os.environ["HVDLITE_RANK"], os.getpid(), flush=True)  # it may be killed during the imports

import torch  # noqa: E402

import hvdlite_torch as hvd  # noqa: E402

hvd.init()
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(4000, 20), torch.randn(4000, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
print("training", flush=True)
while True:
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
