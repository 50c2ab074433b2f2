"""Process sets, samplers, loaders and helpers by Horovod's names."""

import horovod.torch as hvd
import horovod.torch.mpi_ops
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import is_version_greater_equal_than, num_rank_is_power_2, split_list
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.torch.elastic import ElasticSampler

even, odd = hvd.ProcessSet([0]), hvd.ProcessSet([1])
hvd.init(process_sets=[even, odd])
mine = even if hvd.rank() % 2 == 0 else odd
assert hvd.allreduce(torch.ones(3) * hvd.rank(), process_set=mine).tolist() == [hvd.rank()] * 3
assert horovod.torch.mpi_ops.is_homogeneous()
assert hvd.remove_process_set(odd) and odd.process_set_id is None
assert split_list([1, 2, 3], 2) == [[1, 2], [3]] and num_rank_is_power_2(4) and not num_rank_is_power_2(6)
assert is_version_greater_equal_than(torch.__version__, "2.0.0")

model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), hvd.SyncBatchNorm(4), torch.nn.Flatten(), torch.nn.LazyLinear(2))
dataset = torch.utils.data.TensorDataset(torch.randn(50, 1, 6, 6))
sampler = ElasticSampler(dataset, shuffle=True)
loader = torch.utils.data.DataLoader(dataset, batch_size=5, sampler=sampler)
model(dataset[0][0][None])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for index, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sampler.record_batch(index, 5)
    assert sampler.processed_num == 50
seen = hvd.allgather(torch.tensor(list(ElasticSampler(dataset, seed=3)))).tolist()
assert sorted(seen) == list(range(50))
half = ElasticSampler(dataset)
half.load_state_dict({"epoch": 0, "processed_num": 20})
assert len(half) == 15 and len(set(hvd.allgather(torch.tensor(list(half))).tolist())) == 30

class Numbers(BaseDataLoader):
    def __len__(self):
        return 4
    def _iterate(self):
        yield from range(4)

class Ahead(AsyncDataLoaderMixin, Numbers):
    def _process_batch(self, batch):
        return batch * 10

ahead = Ahead(async_loader_queue_size=2)
assert list(ahead) == [0, 10, 20, 30] == list(ahead)
for _ in ahead:
    break
ahead.close_async_loader()
try:
    hvd.allreduce(torch.ones(hvd.rank() + 1), name="uneven")
except HorovodInternalError as error:
    assert "uneven" in str(error)
else:
    raise SystemExit("no error")
finish = hvd.sparse_allreduce_async(torch.eye(3).to_sparse() * (hvd.rank() + 1), name="s", op=hvd.Sum)
assert finish().to_dense().diagonal().tolist() == [3, 3, 3]
assert hvd.join() in (0, 1)
print("done")
