"""Elastic training as one writes it for Horovod, without a launcher that is elastic."""

import horovod.torch as hvd
import torch
from horovod.common.elastic import ObjectState, State
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from horovod.runner.elastic.worker import HostUpdateResult
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState, get_handler_registry

hvd.init()
torch.manual_seed(hvd.rank())
dataset = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
sampler = ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01 * hvd.size(), momentum=0.9),
                                     named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=10 * hvd.rank())
assert isinstance(state, (TorchState, ObjectState, State)) and len(get_handler_registry()) >= 3


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


@hvd.elastic.run
def train(state):
    assert state.batch == 0
    for state.epoch in range(state.epoch, 2):  # noqa: B020 - as in the examples of Horovod
        for state.batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            (state.model(x) - y).square().mean().backward()
            optimizer.step()
            state.sampler.record_batch(state.batch, len(x))
            if state.batch % 2 == 0:
                state.commit()
            else:
                state.check_host_updates()
        state.sampler.set_epoch(state.epoch + 1)
        state.batch = 0
    return state.epoch


state.register_reset_callbacks([on_state_reset])
assert train(state) == 1
assert len({tuple(each) for each in hvd.allgather_object(model.weight.flatten().tolist())}) == 1
state.on_reset()
with torch.no_grad():
    model.weight.zero_()
state.restore()
assert model.weight.abs().sum() > 0
assert issubclass(HostsUpdatedInterrupt, RuntimeError) and not issubclass(HostsUpdatedInterrupt, HorovodInternalError)
assert HostUpdateResult.mixed == HostUpdateResult.added | HostUpdateResult.removed
assert HostDiscoveryScript("printf 'a:3\\nb\\n'", 2).find_available_hosts_and_slots() == {"a": 3, "b": 2}
hosts = FixedHosts({"a": 1})
hosts.set({"b": 2})
assert isinstance(hosts, HostDiscovery) and hosts.find_available_hosts_and_slots() == {"b": 2}
print("done")
