"""What ranks do in test_outer.py."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import hvdlite_torch as hvd
from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, PeerLostError, ReplicaMismatchError, UnsupportedError
from hvdlite.training.outer.schedule import divide
from tests.training.outer.programs import oracle


def model(dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with tied and frozen parameters, and one in another memory format."""
    torch.manual_seed(3)
    convolution: Any = torch.nn.Conv2d(2, 4, 3)
    made = torch.nn.Sequential(convolution.to(memory_format=torch.channels_last), torch.nn.Flatten(), torch.nn.Linear(16, 8),
                               torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    made[6].weight = made[4].weight
    made[2].bias.requires_grad_(False)
    return made.to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def step_of(module: Any, optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    module(batch(step, rank, next(module.parameters()).dtype)).square().mean().backward()
    optimizer.step()


def made(module: Any, outer: Any, kind: Callable[..., Any] = torch.optim.Adam, **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(kind(module.parameters(), lr=0.02), module.named_parameters(), outer=outer, **arguments)


def same(module: Any, other: Any) -> bool:
    return all(map(torch.equal, module.parameters(), other.parameters()))


def equals_synchronous(workers: str) -> None:
    """LocalSGD(1) with SGD, in float64."""
    hvd.init()
    local, whole = model(torch.float64), model(torch.float64)
    optimizer = made(local, hvd.LocalSGD(1, workers=workers), torch.optim.SGD)
    other = made(whole, None, torch.optim.SGD)
    for step in range(20):
        step_of(local, optimizer, step, hvd.rank())
        step_of(whole, other, step, hvd.rank())
        for own, wanted in zip(local.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)
    assert not same(local, model(torch.float64))


def equals_the_oracle() -> None:
    """Each rank trains all workers in one process, too, with the same optimizer; bit by bit."""
    hvd.init()
    for fragments in range(1, 6):
        settings = hvd.DiLoCo(4, workers="rank", fragments=fragments, delay=0, wire=None)
        module = model()
        optimizer = made(module, settings)
        for step in range(1, 15):
            step_of(module, optimizer, step, hvd.rank())
        plain = [model() for _ in range(hvd.size())]
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.02) for each in plain]
        initial = [each.detach().numpy().copy().reshape(-1) for each in plain[0].parameters()]

        def learn(worker: int, step: int, arrays: list[Array], plain: Any = plain, optimizers: Any = optimizers) -> None:
            for parameter, values in zip(plain[worker].parameters(), arrays, strict=True):
                parameter.data.copy_(torch.from_numpy(values).view(parameter.shape))
            step_of(plain[worker], optimizers[worker], step, worker)
            for parameter, values in zip(plain[worker].parameters(), arrays, strict=True):
                values[:] = parameter.detach().numpy().reshape(-1)

        local, weights = oracle.train(settings, initial, divide([each.size for each in initial], fragments), hvd.size(), 14,
                                      learn)
        found = optimizer.global_weights()
        for (name, parameter), values, wanted in zip(module.named_parameters(), weights, local[hvd.rank()], strict=True):
            assert np.array_equal(found[name].numpy().reshape(-1), values), (fragments, name)
            assert np.array_equal(parameter.detach().numpy().reshape(-1), wanted), (fragments, name)
        assert all(np.array_equal(found[name].shape, each.shape) for name, each in module.named_parameters())
        hvd.check_replicas(optimizer.global_weights())


def resumes_anywhere(workers: str) -> None:
    """From a file of each rank's own, after any step."""
    hvd.init()
    for wire in (None, "int8"):
        settings = hvd.DiLoCo(5, workers=workers, fragments=2, delay=2, wire=wire)
        module, files = model(), []
        optimizer = made(module, settings)
        for step in range(1, 14):
            step_of(module, optimizer, step, hvd.rank())
            file = io.BytesIO()
            torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
            files.append(file.getvalue())
        for done in range(1, 13):
            again = model()
            saved = torch.load(io.BytesIO(files[done - 1]), weights_only=True)
            again.load_state_dict(saved["model"])
            other = made(again, settings)
            other.load_state_dict(saved["optimizer"])
            assert other.state_dict()["outer"]["step"] == done
            for step in range(done + 1, 14):
                step_of(again, other, step, hvd.rank())
            assert same(again, module), (wire, done)
        optimizer.load_state_dict(torch.load(io.BytesIO(files[3]), weights_only=True)["optimizer"])  # in the middle of a run
        module.load_state_dict(torch.load(io.BytesIO(files[3]), weights_only=True)["model"])
        for step in range(5, 14):
            step_of(module, optimizer, step, hvd.rank())
        assert same(again, module), wire


def only_rank_zero_saves() -> None:
    """All ranks load its file: they go on with its weights and rounding errors of zero."""
    hvd.init()
    settings = hvd.DiLoCo(4, workers="rank", fragments=2, delay=1)
    module = model()
    optimizer = made(module, settings)
    for step in range(1, 12):
        step_of(module, optimizer, step, hvd.rank())
    saved = hvd.broadcast_object({"model": module.state_dict(), "optimizer": optimizer.state_dict()})
    for way in ("file", "broadcast"):
        again = model()
        other = made(again, settings)
        if way == "file" or hvd.rank() == 0:
            again.load_state_dict(saved["model"])
            other.load_state_dict(saved["optimizer"])
        if way == "broadcast":
            hvd.broadcast_parameters(again.state_dict(), 0)
            hvd.broadcast_optimizer_state(other, 0)
        for step in range(12, 20):
            step_of(again, other, step, hvd.rank())
        other.synchronize_outer()
        hvd.check_replicas(again.state_dict())
    plain = torch.optim.Adam(module.parameters())
    plain.load_state_dict(saved["optimizer"])
    assert "outer" not in plain.state_dict()


def one_worker() -> None:
    """It is the plain distributed optimizer."""
    hvd.init()
    module, other = model(), model()
    optimizer, plain = made(module, hvd.DiLoCo(3)), made(other, None)
    for step in range(8):
        step_of(module, optimizer, step, hvd.rank())
        step_of(other, plain, step, hvd.rank())
    optimizer.synchronize_outer(module)
    assert same(module, other) and "outer" not in optimizer.state_dict()
    weights = torch.cat([each.detach().reshape(-1) for each in model().parameters()]).numpy()
    saved = {"weights": weights, "momentum": None, "start": None, "errors": None, "begun": 6, "due": 6, "is_reset": False}
    optimizer.load_state_dict({**optimizer.state_dict(), "outer": {"step": 6, "fragments": [saved]}})
    step_of(module, optimizer, 8, hvd.rank())
    assert "outer" not in optimizer.state_dict(), "of several workers, which are not there any more"
    assert torch.equal(optimizer.global_weights()["0.weight"], module[0].weight)
    assert torch.equal(optimizer.global_weights()["0.weight"], module[0].weight)
    with optimizer.join(module):
        pass


def synchronizes() -> None:
    """Parameters and buffers are equal on all ranks afterwards, and a second call changes nothing."""
    hvd.init()
    module: Any = torch.nn.Sequential(model(), torch.nn.BatchNorm1d(8))
    optimizer = made(module, hvd.DiLoCo(10, workers="rank", fragments=3, delay=1, merge=0.5))
    for step in range(7):
        step_of(module, optimizer, step, hvd.rank())
    own = module[1].running_mean.clone()
    wanted = hvd.allreduce(own.clone())
    assert not torch.equal(own, wanted)
    optimizer.synchronize_outer(module)
    torch.testing.assert_close(module[1].running_mean, wanted)
    hvd.check_replicas(module.state_dict())
    before = copy.deepcopy(module)
    optimizer.synchronize_outer(module)
    assert same(module, before)
    for name, values in optimizer.global_weights().items():
        assert torch.equal(values, module.get_parameter(name)), name
    for step in range(7, 30):
        step_of(module, optimizer, step, hvd.rank())


def dtypes() -> None:
    """Parameters in 16 bits, complex ones, of several dtypes."""
    hvd.init()
    for dtype in (torch.bfloat16, torch.complex64, torch.float64):
        parameters = [torch.nn.Parameter(torch.ones(50, 3, dtype=dtype)), torch.nn.Parameter(torch.ones(700)),
                      torch.nn.Parameter(torch.ones((), dtype=dtype))]
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1),
                                                  outer=hvd.DiLoCo(3, workers="rank", fragments=2, delay=1))
        for step in range(1, 9):
            optimizer.zero_grad()
            losses = [(hvd.rank() + step) * each.abs().square().float().sum() for each in parameters]
            torch.stack(losses).sum().backward()
            optimizer.step()
        optimizer.synchronize_outer()
        hvd.check_replicas(optimizer.global_weights())
        hvd.check_replicas([(str(index), each) for index, each in enumerate(parameters)])
        for each, (name, values) in zip(parameters, optimizer.global_weights().items(), strict=True):
            assert values.is_complex() == each.is_complex() and torch.equal(values.to(each.dtype), each), (dtype, name)
    # What 16 bits cannot hold is no change: without any step there is none.
    parameter = torch.nn.Parameter(torch.full((9,), 1.0, dtype=torch.bfloat16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0),
                                         outer=hvd.DiLoCo(1, workers="rank", delay=0, momentum=0.0, wire=None))
    for value in (0.0, 0.125, 0.0, 0.0, 0.0):
        parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    assert optimizer.global_weights()["noname.0.0"].tolist() == [1 - np.float32(0.7) * np.float32(0.125)] * 9


def two_optimizers_and_process_sets() -> None:
    """Of one job, with workers of any ranks; copies are plain."""
    hvd.init()
    sets = [hvd.add_process_set([0, 2]), hvd.add_process_set([1])]
    first, second = model(), model()
    one = made(first, hvd.DiLoCo(4, workers=sets, fragments=2, delay=1))
    two = made(second, hvd.LocalSGD(3, workers=sets))
    for step in range(12):
        step_of(first, one, step, hvd.rank())
        step_of(second, two, step, hvd.rank())
    hvd.check_replicas(second.state_dict())
    hvd.check_replicas(one.global_weights())
    if hvd.rank() != 1:
        hvd.check_replicas(first.state_dict(), sets[0])
    plain = copy.deepcopy(one)
    assert type(plain) is torch.optim.Adam and "outer" not in plain.state_dict()


def goes_on_in_the_next_world() -> None:
    """Also where everything is merged, or global weights are asked for, before the next step."""
    hvd.init()
    module = model()
    optimizer = made(module, hvd.DiLoCo(4, workers="rank", fragments=2, delay=1))
    for step in range(1, 7):
        step_of(module, optimizer, step, hvd.rank())
    hvd.shutdown()
    assert optimizer.state_dict()["outer"]["step"] == 6
    hvd.init()
    hvd.check_replicas(optimizer.global_weights())
    optimizer.synchronize_outer(module)
    hvd.check_replicas(module.state_dict())
    for step in range(7, 12):
        step_of(module, optimizer, step, hvd.rank())
    assert optimizer.state_dict()["outer"]["step"] == 11
    hvd.check_replicas(optimizer.global_weights())


def synchronizes_after_loading() -> None:
    """Before a step: each rank has loaded its own file."""
    hvd.init()
    module, again = model(), model()
    settings = hvd.DiLoCo(8, workers="rank", fragments=2, delay=1)
    optimizer, other = made(module, settings), made(again, settings)
    for step in range(1, 8):
        step_of(module, optimizer, step, hvd.rank())
    again.load_state_dict(module.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for name, values in optimizer.global_weights().items():
        assert torch.equal(other.global_weights()[name], values), name
    other.synchronize_outer(again)
    optimizer.synchronize_outer(module)
    assert same(module, again)
    hvd.check_replicas(again.state_dict())


def broadcasts_in_the_middle() -> None:
    """Rank 0's optimizer state, while exchanges are under way."""
    hvd.init()
    module = model()
    optimizer = made(module, hvd.DiLoCo(5, workers="rank", fragments=2, delay=2))
    for step in range(1, 9):
        step_of(module, optimizer, step, hvd.rank())
    assert any(each["start"] is not None for each in optimizer.state_dict()["outer"]["fragments"])
    hvd.broadcast_parameters(module.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for step in range(9, 23):
        step_of(module, optimizer, step, hvd.rank())
    hvd.check_replicas(optimizer.global_weights())
    optimizer.synchronize_outer(module)
    hvd.check_replicas(module.state_dict())


def equal_buffers_stay() -> None:
    """Those that are equal on all ranks are not summed, which would overflow."""
    hvd.init()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        module: Any = torch.nn.Linear(2, 2)
        hvd.broadcast_parameters(module.state_dict(), 0)
        for name, value in (("mask", torch.finfo(dtype).min), ("share", 0.1), ("own", float(hvd.rank()))):
            module.register_buffer(name, torch.full((3,), value, dtype=dtype))
        optimizer = made(module, hvd.DiLoCo(8, workers="rank"))
        optimizer.synchronize_outer(module)
        assert module.mask.tolist() == [torch.finfo(dtype).min] * 3
        assert torch.equal(module.share, torch.full((3,), 0.1, dtype=dtype))
        assert module.own.tolist() == [0.5] * 3


def refused() -> None:
    hvd.init()
    outer = hvd.DiLoCo(4, workers="rank")
    for arguments, what in (({"op": hvd.Adasum}, "op=Adasum"), ({"comm_hook": hvd.comm_hooks.PowerSGD()}, "comm_hook"),
                            ({"sharded": True}, "sharded=True")):
        raises(UnsupportedError, what, functools.partial(made, model(), outer, **arguments))
    raises(ValueError, "workers=", lambda: made(model(), outer, process_set=hvd.add_process_set([0])))
    raises(ValueError, "not 4", lambda: made(model(), 4))
    raises(UnsupportedError, "SparseAdam", lambda: made(model(), outer, torch.optim.SparseAdam))
    raises(MismatchError, f"every={4}", lambda: made(model(), hvd.DiLoCo(4 + hvd.rank())))
    strategy = hvd.MirroredStrategy()
    with strategy.scope():
        raises(ValueError, "MirroredStrategy", lambda: made(model(), outer))

    module = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = made(module, outer, torch.optim.SGD)
    module(torch.tensor([1, 2])).sum().backward()
    raises(UnsupportedError, "'weight' is sparse", optimizer.step)

    module = model()
    optimizer = made(module, outer)
    step_of(module, optimizer, 1, hvd.rank())
    raises(UnsupportedError, "after the first step",
           lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]}))
    raises(UnsupportedError, "join()", lambda: optimizer.join(module).__enter__())
    raises(UnsupportedError, "torch.save", lambda: hvd.save("unused", optimizer=optimizer))

    module = model()
    with torch.no_grad():
        module[2].weight[0, 0] += hvd.rank()
    optimizer = made(module, outer)
    raises(ReplicaMismatchError, "'2.weight'", lambda: step_of(module, optimizer, 1, hvd.rank()))
    some = torch.nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(2)})
    named = list(some.named_parameters())[:1 + hvd.rank()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([each for _, each in named]), named, outer=outer)
    raises(ReplicaMismatchError, "'b' of rank 0: missing; rank 1: there", optimizer.step)


def raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")


def a_rank_skips_a_step(calls: bool) -> None:
    """And ends, or calls something else."""
    hvd.init()
    module = model()
    optimizer = made(module, hvd.DiLoCo(3, workers="rank", fragments=1, delay=0))
    try:
        for step in range(1, 10):
            if hvd.rank() != 1 or step != 4:
                step_of(module, optimizer, step, hvd.rank())
        if calls:
            api.runtime().barrier("end").wait()
    except PeerLostError as error:
        print(f"noticed {error}", flush=True)
        assert "1" in str(error)
