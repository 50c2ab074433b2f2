"""What ranks do in test_sharded.py."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

import hvdlite_torch as hvd
from hvdlite import api
from hvdlite.core.errors import ReplicaMismatchError, UnsupportedError
from hvdlite_torch.elastic import TorchState

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    **{name: getattr(torch.optim, name) for name in ("Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax",
                                                     "Adadelta", "Rprop", "ASGD", "Adafactor")},
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.Adam, foreach=True, amsgrad=True),
    "Muon": torch.optim.Muon,
}


def model(seed: int = 3) -> Any:
    """Return a model with matrices of several sizes and memory formats."""
    torch.manual_seed(seed)
    convolution: Any = torch.nn.Conv2d(2, 4, 3)
    return torch.nn.Sequential(
        convolution.to(memory_format=torch.channels_last), torch.nn.Flatten(), torch.nn.Linear(16, 31),
        torch.nn.Tanh(), torch.nn.Linear(31, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def parameters(name: str, module: torch.nn.Module) -> list[Any]:
    """Return what an optimizer gets: groups with other rates, or matrices alone."""
    own = list(module.parameters())
    if name == "Muon":
        for each in own:
            each.requires_grad_(each.dim() == 2)
        return [each for each in own if each.dim() == 2]
    return [{"params": own[:3]}, {"params": own[3:], "lr": 0.02}]


def train(module: torch.nn.Module, optimizer: Any, steps: range, closure: bool = False) -> None:
    """Train on batches that belong to this rank and the step."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        x = torch.randn(6, 2, 4, 4, generator=generator)

        def computed(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            return loss
        if closure:
            optimizer.step(computed)
        else:
            computed()
            optimizer.step()


def made(name: str, module: torch.nn.Module, *, sharded: bool) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(OPTIMIZERS[name](parameters(name, module)), sharded=sharded)


def same(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, module.parameters(), other.parameters()))


def equals_unsharded() -> None:
    """Bit for bit, with every optimizer; and each state is on one rank."""
    torch.set_num_threads(1)
    hvd.init()
    for name in OPTIMIZERS:
        for closure in (False, True):
            whole = model()
            plain = made(name, whole, sharded=False)
            train(whole, plain, range(5), closure)
            module = model()
            optimizer = made(name, module, sharded=True)
            train(module, optimizer, range(5), closure)
            assert same(whole, module), (name, closure)
            counts = hvd.allgather_object(len(optimizer.state))
            assert sum(counts) == len(plain.state) and min(counts) > 0, (name, counts)
            hvd.check_replicas(module.state_dict())


def sparse_gradients() -> None:
    """Rows of embeddings, bit for bit."""
    torch.set_num_threads(1)
    hvd.init()
    for name, dense in (("SparseAdam", False), ("Adagrad", False), ("SGD", True)):
        ways: dict[bool, Any] = {}
        for sharded in (False, True):
            torch.manual_seed(5)
            module = torch.nn.ModuleList(torch.nn.Embedding(9, width, sparse=True) for width in (4, 2, 3))
            optimizer = hvd.DistributedOptimizer(getattr(torch.optim, name)([*module.parameters()], lr=0.1),
                                                 sparse_as_dense=dense, sharded=sharded)
            for step in range(4):
                optimizer.zero_grad()
                words = torch.tensor([step, 3 + hvd.rank(), 3])
                torch.cat([each(words) for each in module], 1).square().sum().backward()
                optimizer.step()
            ways[sharded] = module
            counts = hvd.allgather_object(len(optimizer.state))
        assert same(ways[False], ways[True]), name
        assert name == "SGD" or sum(counts) == 3, counts


def half_on_these_ranks(directory: str, resumes: bool) -> None:
    """Train three steps, save; or load, on another number of ranks, and train three more; sharded and not."""
    torch.set_num_threads(1)
    hvd.init()
    for name in ("Adam", "SGD", "Muon"):
        ways = {}
        for sharded in (False, True):
            module = model()
            optimizer = made(name, module, sharded=sharded)
            if resumes:
                saved = torch.load(f"{directory}/{name}-{sharded}.pt")
                module.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            train(module, optimizer, range(3, 6) if resumes else range(3))
            if sharded:
                optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
            if hvd.rank() == 0 and not resumes:
                torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()},
                           f"{directory}/{name}-{sharded}.pt")
            ways[sharded] = module, optimizer
        assert same(ways[False][0], ways[True][0]), name
        if hvd.rank() == 0:
            plain, sharded_state = (each.state_dict() for _, each in ways.values())
            assert str({**plain, "state": sorted(plain["state"].items())}) == str(
                {**sharded_state, "state": sorted(sharded_state["state"].items())})
            OPTIMIZERS[name](parameters(name, model())).load_state_dict(sharded_state)


def durable(directory: str, loads: bool) -> None:
    """`hvd.save` takes it as it is, and `hvd.load` on any number of ranks."""
    torch.set_num_threads(1)
    hvd.init()
    module = model()
    optimizer = made("Adam", module, sharded=True)
    if not loads:
        train(module, optimizer, range(2))
        hvd.save(directory, model=module, optimizer=optimizer)
        if hvd.rank() == 0:
            torch.save((module.state_dict(), optimizer.state_dict()), f"{directory}/plain.pt")
        return
    train(module, optimizer, range(1))  # from here, other parameters have owners
    hvd.load(directory, model=module, optimizer=optimizer)
    whole = model()
    plain = made("Adam", whole, sharded=False)
    saved, state = torch.load(f"{directory}/plain.pt")
    whole.load_state_dict(saved)
    plain.load_state_dict(state)
    assert same(whole, module) and len(optimizer.state) < len(plain.state)
    train(whole, plain, range(2, 4))
    train(module, optimizer, range(2, 4))
    assert same(whole, module)


def memory_is_used_again() -> None:
    """What owners show the others is given back with the optimizer; parameters outlive the world."""
    torch.set_num_threads(1)
    hvd.init()
    ends = []
    for _ in range(4):
        module = model()
        optimizer: Any = made("SGD", module, sharded=True)
        train(module, optimizer, range(2))
        ends.append(api.runtime().connections.heaps[hvd.rank()]._next)
        del module, optimizer
        gc.collect()
        hvd.barrier()
    assert len(set(ends[1:])) == 1, ends
    module = model()
    optimizer = made("SGD", module, sharded=True)
    train(module, optimizer, range(2))
    values = [each.detach().clone() for each in module.parameters()]
    hvd.shutdown()
    hvd.init()
    assert all(map(torch.equal, values, module.parameters()))


def hooks_and_checks() -> None:
    """Hooks from before see all parameters and the new values; a difference between replicas is found."""
    torch.set_num_threads(1)
    hvd.init()
    module, seen = model(), list[Any]()
    plain = OPTIMIZERS["Adam"](parameters("Adam", module))
    plain.register_step_pre_hook(lambda it, *arguments: seen.append([len(group["params"]) for group in it.param_groups]))

    def sums() -> list[float]:
        return [float(each.detach().sum()) for each in module.parameters()]
    plain.register_step_post_hook(lambda *arguments: seen.append(sums()))
    optimizer = hvd.DistributedOptimizer(plain, sharded=True)
    module[2].bias.requires_grad_(True)
    for number in range(3):
        optimizer.zero_grad()
        module(torch.ones(2, 2, 4, 4) * (1 + hvd.rank())).square().mean().backward()
        if number == 0:
            module[0].requires_grad_(False)  # it has a gradient
        optimizer.step()
        assert seen[-2] == [3, 5] and seen[-1] == sums()
    assert hvd.allgather_object(seen) == [seen] * hvd.size()
    if hvd.rank():
        with torch.no_grad():
            module[2].weight[0, 0] += 1
    try:
        train(module, optimizer, range(1))
        raise AssertionError("no difference was found")
    except ReplicaMismatchError as error:
        assert "'noname.0.2'" in str(error), error


def state_is_taken_over_from_the_root() -> None:
    """By `broadcast_optimizer_state`: before the first step, when only the root has loaded something, and after steps."""
    torch.set_num_threads(1)
    hvd.init()
    whole, shared = model(), model()
    plain, optimizer = made("Adam", whole, sharded=False), made("Adam", shared, sharded=True)
    earlier = model()
    before = OPTIMIZERS["Adam"](parameters("Adam", earlier))
    earlier(torch.ones(1, 2, 4, 4)).sum().backward()
    before.step()
    for each in (plain, optimizer):
        if hvd.rank() == 0:
            each.load_state_dict(copy.deepcopy(before.state_dict()))
        hvd.broadcast_optimizer_state(each, 0)
    for steps in (range(2), range(2, 4)):
        train(whole, plain, steps)
        train(shared, optimizer, steps)
        assert same(whole, shared)
        hvd.broadcast_optimizer_state(optimizer, 1)


def what_changes_between_steps() -> None:
    """Parameters move to another dtype, thaw, are added; a step fails; parameters are views of each other."""
    torch.set_num_threads(1)
    hvd.init()
    ways = {}
    for sharded in (False, True):
        module = model()
        for each in (module[2], module[6]):
            each.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(Failing([*module.parameters()][:-2], lr=0.1), sharded=sharded)
        groups = [group["params"] for group in optimizer.param_groups]
        module(torch.ones(2, 2, 4, 4) * (1 + hvd.rank())).square().mean().backward()
        with torch.inference_mode():
            optimizer.step()
        train(module, optimizer, range(2))
        module[2].requires_grad_(True)
        train(module, optimizer, range(2, 4))
        module[6].requires_grad_(True)
        optimizer.add_param_group({"params": [*module.parameters()][-2:]})
        train(module, optimizer, range(4, 6))
        Failing.fails = True
        try:
            train(module, optimizer, range(1))
            raise AssertionError("the step has not failed")
        except ZeroDivisionError:
            Failing.fails = False
        if sharded:
            optimizer.consolidate_state_dict(to=None)  # type: ignore[attr-defined]
        assert len(optimizer.state_dict()["param_groups"][0]["params"]) == 6
        assert [len(group["params"]) for group in optimizer.param_groups] == [6, 2]
        assert optimizer.param_groups[0]["params"] is groups[0]
        module.to(memory_format=torch.channels_last).half().float()  # out of the blocks
        train(module, optimizer, range(6, 8))
        module.share_memory()  # and with the places
        train(module, optimizer, range(8, 10))
        ways[sharded] = module
    assert same(ways[False], ways[True])
    hvd.check_replicas(ways[True].state_dict())


class Failing(torch.optim.SGD):
    """Fails in a step, when it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ZeroDivisionError
        return super().step(closure)


class Twice(torch.optim.SGD):
    """Calls the closure twice."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def refused() -> None:
    """What a sharded optimizer does not do says so, and so do ranks that are not alike."""
    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()

    def error(kind: type[Exception], act: Callable[[], object]) -> str:
        try:
            act()
        except kind as found:
            return str(found)
        raise AssertionError(f"no {kind.__name__}")
    module = model()
    optimizer: Any = made("Adam", module, sharded=True)
    optimizer.consolidate_state_dict()
    assert not optimizer.state_dict()["state"]
    train(module, optimizer, range(1))
    assert error(UnsupportedError, optimizer.state_dict) == (
        f"rank {rank}: a sharded optimizer has the state of its own parameters only; call "
        f"optimizer.consolidate_state_dict(to={rank}) "
        "on all ranks, after the step and before state_dict()")
    optimizer.consolidate_state_dict()
    if rank:
        assert "(the last call gathered it on rank 0)" in error(UnsupportedError, optimizer.state_dict)
    else:
        assert len(optimizer.state_dict()["state"]) == 8
    assert "the optimizer's state is on ranks 0, 1" in error(ValueError, lambda: optimizer.consolidate_state_dict(to=7))
    train(module, optimizer, range(1, 2))
    assert error(UnsupportedError, optimizer.state_dict)
    assert "cannot be copied" in error(UnsupportedError, lambda: copy.deepcopy(optimizer))
    assert "join() takes the optimizer state from the last rank" in error(UnsupportedError, optimizer.join)
    told = error(UnsupportedError, lambda: TorchState(model, optimizer))
    assert "cannot be part of an elastic state" in told and "call hvd.save() now and then" in told
    own = [*model().parameters()]
    assert "one state for all" in error(UnsupportedError, lambda: hvd.DistributedOptimizer(
        torch.optim.LBFGS(own), sharded=True))
    assert "op=Adasum" in error(UnsupportedError, lambda: hvd.DistributedOptimizer(
        torch.optim.SGD(own, lr=0.1), op=hvd.Adasum, sharded=True))
    wrapper: Any = torch.optim.SGD(own, lr=0.1)
    wrapper.inner = torch.optim.Adam(own)
    assert "SGD has its state in another optimizer, 'inner' (Adam)" in error(
        UnsupportedError, lambda: hvd.DistributedOptimizer(wrapper, sharded=True))
    other = model()
    twice = hvd.DistributedOptimizer(Twice(other.parameters(), lr=0.1), sharded=True)
    assert "the closure of step() more than once" in error(UnsupportedError, lambda: train(other, twice, range(1), True))
    for is_trained in (True, False):
        view = torch.nn.Parameter(own[1].detach().view(2, 2), requires_grad=is_trained)
        twins = hvd.DistributedOptimizer(torch.optim.SGD([own[1], view], lr=0.1), sharded=True)
        (own[1].sum() + view.sum()).backward()
        assert "parameters 'noname.0.0' and 'noname.0.1' share memory" in error(UnsupportedError, twins.step)
    unlike = model(seed=rank)
    forgotten = made("SGD", unlike, sharded=True)
    told = error(ReplicaMismatchError, lambda: train(unlike, forgotten, range(1)))
    assert "replicas differ in 'noname.0.0'" in told and "call broadcast_parameters before the first step" in told
    hvd.shutdown()
    hvd.init()
    told = error(UnsupportedError, lambda: train(module, optimizer, range(1)))
    assert "of an earlier world has a part of its state only" in told and "after init() load_state_dict()" in told


def some_ranks() -> None:
    """Owners are the ranks of the process set; on the other rank the optimizer trains alone."""
    torch.set_num_threads(1)
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    module = model(seed=3)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.Adam(module.parameters()), process_set=pair, sharded=True)
    train(module, optimizer, range(3))
    counts = hvd.allgather_object(len(optimizer.state))
    assert counts[1] == 8 and counts[0] + counts[2] == 8 and min(counts) > 0, counts
    optimizer.consolidate_state_dict(to=None if hvd.rank() != 1 else 0)
    assert len(optimizer.state_dict()["state"]) == 8
