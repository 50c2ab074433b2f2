"""Communication hooks beside torch's own over Gloo: DDP's hooks through the adapter, and hooks of the same algorithm."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import DistributedOptimizer, comm_hooks  # noqa: E402
from tests.worlds import RAISES, TORCH, processes, threads  # noqa: E402


def test_hooks_train_like_ddps_own(tmp_path: Any) -> None:
    processes(2, RAISES + f"""
import os, numpy as np, torch, torch.distributed as dist, hvdlite_torch as hvd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel
from hvdlite_torch.comm_hooks import Cast, DDPHook, PowerSGD
hvd.init()
torch.set_num_threads(1)

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 16), torch.nn.Tanh(),
                               torch.nn.Linear(16, 3))

def losses(net, optimizer, steps):
    torch.manual_seed(100 + hvd.rank())
    truth = torch.linspace(-1, 1, 36).reshape(12, 3)
    found = []
    for _ in range(steps):
        x = torch.randn(16, 12)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), x @ truth)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found

def ours(hook, steps=12):
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), net.named_parameters(),
                                         comm_hook=hook)
    return losses(net, optimizer, steps), [parameter.detach() for parameter in net.parameters()]

def theirs(state, hook, steps=12):
    net = model()
    wrapped = DistributedDataParallel(net)
    wrapped.register_comm_hook(state, hook)
    return losses(wrapped, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), steps), list(net.parameters())

def equal(one, other, **tolerance):
    for mine, other in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(mine, other.detach(), **tolerance)

raises(RuntimeError, "call torch.distributed.init_process_group",
       lambda: ours(DDPHook(None, default_hooks.allreduce_hook)))
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=hvd.rank(), world_size=2)

# The same hooks.
exact = theirs(None, default_hooks.allreduce_hook)
half = theirs(None, default_hooks.fp16_compress_hook)
equal(ours(DDPHook(None, default_hooks.allreduce_hook, bucket_cap_mb=0.001)), exact)
equal(ours(DDPHook(None, default_hooks.fp16_compress_hook)), half)

def state(**more):
    return powersgd.PowerSGDState(None, **{{"start_powerSGD_iter": 2, "min_compression_rate": 1, **more}})

ranks = 1, 3
reference = {{rank: theirs(state(matrix_approximation_rank=rank), powersgd.powerSGD_hook) for rank in ranks}}
for rank in ranks:
    equal(ours(DDPHook(state(matrix_approximation_rank=rank), powersgd.powerSGD_hook)), reference[rank])
wrapper = default_hooks.fp16_compress_wrapper(powersgd.powerSGD_hook)
equal(ours(DDPHook(state(), wrapper)), theirs(state(), wrapper))

# The same algorithms. torch's casts are divided and summed in 16 bits, ours in 32.
equal(ours(Cast(torch.float16)), half, rtol=1e-2, atol=1e-3)
equal(ours(Cast(torch.bfloat16)), exact, rtol=1e-1, atol=1e-2)  # DDP has its bf16 hook for GPUs only

def factors(rank):
    '''Return what torch begins with: drawn for the last layer first, because DDP's bucket begins with it.'''
    weights = reversed(list(model().named_parameters()))
    torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
    found = {{}}
    for name, weight in weights:
        if weight.dim() == 2 and min(rank, *weight.shape) * sum(weight.shape) < weight.numel():
            found[name] = torch.randn(1, weight.shape[1], min(rank, *weight.shape))[0]
    return found

for rank in ranks:
    hook = PowerSGD(rank, start_iter=2, min_compression_rate=1.0)
    start = factors(rank)
    hook.load_state_dict({{**hook.state_dict(), "factors": start}})
    equal(ours(hook), reference[rank], rtol=1e-3, atol=1e-4)

# Other factors at the beginning: it converges as torch's does.
for rank in ranks:
    mine = sum(ours(PowerSGD(rank, start_iter=2, min_compression_rate=1.0), 80)[0][-10:])
    other = sum(theirs(state(matrix_approximation_rank=rank), powersgd.powerSGD_hook, 80)[0][-10:])
    print(rank, mine, other)
    assert mine < 1.5 * other + 0.01, (rank, mine, other)
hvd.shutdown()
os._exit(0)  # a thread of Gloo may hold the last reference to its group, and aborts when it destroys that
    """, timeout=180, imported=TORCH)


def test_an_adapted_hook_sees_buckets_that_stay_the_same() -> None:
    """A parameter that no rank has in a step is zeros in its bucket; one that comes later gets a bucket of its own."""
    def step(runtime: Runtime) -> None:
        seen: list[Any] = []

        def average(state: str, bucket: Any) -> Any:
            assert state == "state"
            seen.append((bucket.index(), bucket.is_last(), [parameter.shape[0] for parameter in bucket.parameters()],
                         bucket.buffer().tolist(), [gradient.tolist() for gradient in bucket.gradients()]))
            future: Any = torch.futures.Future()
            future.set_result([bucket.buffer() * 2])
            return future
        a, b, c = (torch.nn.Parameter(torch.ones(length)) for length in (1, 2, 3))
        optimizer = DistributedOptimizer(torch.optim.SGD([a, b, c], lr=0.1), _runtime=runtime,
                                         comm_hook=comm_hooks.DDPHook("state", average))
        for used in ((a, b), (b,), (a, b, c)):
            seen.clear()
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in used).backward()
            for parameter in (a, b, c):
                if any(parameter is each for each in used):
                    assert (parameter.grad == 2).all()
                else:
                    assert parameter.grad is None
            optimizer.step()
            has_a = float(any(a is each for each in used))
            expected = [(0, len(used) < 3, [2, 1], [1, 1, has_a], [[1, 1], [has_a]])]
            if len(used) == 3:
                expected.append((1, True, [3], [1, 1, 1], [[1, 1, 1]]))
            assert seen == expected
        optimizer = DistributedOptimizer(torch.optim.SGD([a], lr=0.1), _runtime=runtime,
                                         comm_hook=comm_hooks.DDPHook(None, lambda state, bucket: "nothing"))
        with pytest.raises(TypeError, match=r"must return a torch.futures.Future.*it returned 'nothing'"):
            a.sum().backward()
    threads(2, step)
