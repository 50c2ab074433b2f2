"""Horovod's example of training on MNIST, with random data."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(512, 20), torch.randint(0, 3, (512,)))
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
lr_scaler = hvd.size() if not args.use_adasum else 1
if args.use_adasum and hvd.nccl_built():
    lr_scaler = hvd.local_size()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression,
                                     op=hvd.Adasum if args.use_adasum else hvd.Average,
                                     gradient_predivide_factor=args.gradient_predivide_factor)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()

for epoch in range(3):
    model.train()
    sampler.set_epoch(epoch)
    for _batch_idx, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    scheduler.step()
    average = metric_average(loss.item(), "avg_loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {average:.3f}")
digest = hvd.allgather_object(sum(float(p.sum()) for p in model.parameters()))
assert len(digest) == hvd.size() and max(digest) - min(digest) < 1e-6, digest
print("done")
