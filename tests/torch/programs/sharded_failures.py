"""What ranks do in test_sharded.py where one of them fails, or is not like the others, and with unusual parameters."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

import hvdlite_torch as hvd
from hvdlite.core.errors import UnsupportedError
from tests.torch.programs.sharded import made, model, parameters, same, train


class Failing(torch.optim.Adam):
    """Makes its step, and then raises what it is told to."""

    failure: Any = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.failure is not None:
            raise self.failure
        return loss


def begin(scheduler_first: bool = False) -> tuple[torch.nn.Module, Any]:
    torch.set_num_threads(1)
    hvd.init()
    module = model()
    plain = Failing(parameters("Adam", module))
    if scheduler_first:
        torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    return module, hvd.DistributedOptimizer(plain, sharded=True)


def step_raises_on_an_owner(scheduler_first: bool) -> None:
    """The others get an error that names it; all go on with equal parameters."""
    module, optimizer = begin(scheduler_first)
    assert "closure" in inspect.signature(optimizer.step).parameters  # GradScaler looks for other names there
    for failing, closure in (((1,), False), ((0, 1), True), ((0,), False)):
        if hvd.rank() in failing:
            optimizer.failure = ZeroDivisionError(f"by rank {hvd.rank()}")
        try:
            train(module, optimizer, range(1), closure)
            raise AssertionError("the step has not failed")
        except ZeroDivisionError:
            assert hvd.rank() in failing
        except hvd.StepFailedError as error:
            assert hvd.rank() not in failing and error.rank == failing[0]
            assert all(f"rank {rank}: ZeroDivisionError: by rank {rank}" in str(error) for rank in failing), error
        optimizer.failure = None
        assert error_of(UnsupportedError, optimizer.state_dict), "others have state"
        assert [len(group["params"]) for group in optimizer.param_groups] == [3, 5]
        hvd.check_replicas(module.state_dict())
        train(module, optimizer, range(2, 4))
        hvd.check_replicas(module.state_dict())


def step_raises_before_its_update() -> None:
    """In a hook that was registered before wrapping, also in the first step, and in a closure; all go on."""
    torch.set_num_threads(1)
    hvd.init()
    module, failures = model(), list[Exception]()

    def fail(*arguments: object) -> None:
        if failures:
            raise failures.pop()
    plain = Failing(parameters("Adam", module))
    hook = plain.register_step_pre_hook(fail)
    optimizer: Any = hvd.DistributedOptimizer(plain, sharded=True)

    def closure() -> None:
        optimizer.zero_grad()
        module(torch.ones(2, 2, 4, 4)).mean().backward()
        fail()
    for makes_step in (lambda: train(module, optimizer, range(1)), lambda: optimizer.step(closure)):
        for step in range(2):
            if hvd.rank() == 1:
                failures.append(ZeroDivisionError())
            told = error_of(ZeroDivisionError if hvd.rank() == 1 else hvd.StepFailedError, makes_step)
            assert hvd.rank() == 1 or "rank 1: ZeroDivisionError" in told
            hvd.check_replicas(module.state_dict())
            train(module, optimizer, range(step, step + 1))
            hvd.check_replicas(module.state_dict())
        hook.remove()


def step_is_interrupted() -> None:
    """Ctrl-C in the step of all ranks leaves all parameters in the groups."""
    module, optimizer = begin()
    train(module, optimizer, range(1))
    optimizer.failure = KeyboardInterrupt()
    with contextlib.suppress(KeyboardInterrupt):
        train(module, optimizer, range(1))
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 5]


def forked() -> None:
    """A child has the parameters of the moment of the fork; neither process sees what the other writes."""
    module, optimizer = begin()
    train(module, optimizer, range(2))
    before = [each.detach().clone() for each in module.parameters()]
    (goes_on, go), (answers, answer) = os.pipe(), os.pipe()
    with torch.inference_mode():
        child = os.fork()
    if child == 0:
        try:
            os.read(goes_on, 1)
            os.write(answer, b"y" if all(map(torch.equal, module.parameters(), before)) else b"n")
            with torch.no_grad():
                for each in module.parameters():
                    each.zero_()
            os.write(answer, b"y" if not any(each.any() for each in module.parameters()) else b"n")
        finally:
            os._exit(0)
    train(module, optimizer, range(2, 3))
    after = [each.detach().clone() for each in module.parameters()]
    os.write(go, b"g")
    os.waitpid(child, 0)
    assert os.read(answers, 2) == b"yy"
    assert all(map(torch.equal, module.parameters(), after)) and not any(map(torch.equal, before, after))
    train(module, optimizer, range(3, 4))
    hvd.check_replicas(module.state_dict())


def joined() -> None:
    """A rank that has no more batches would leave its parameters as they are."""
    module, optimizer = begin()
    train(module, optimizer, range(2))
    if hvd.rank() == 1:
        assert "rank 0 left the job" in error_of(hvd.PeerLeftError, hvd.join)
        return
    assert "only 1 of 2 have called it: the others are in join()" in error_of(
        UnsupportedError, lambda: train(module, optimizer, range(2, 3)))


def step_raises_and_ends_the_script() -> None:
    """Without a handler."""
    module, optimizer = begin()
    train(module, optimizer, range(1))
    if hvd.rank() == 1:
        optimizer.failure = ZeroDivisionError("the cause")
    train(module, optimizer, range(1, 2))


def a_rank_is_killed_in_its_step() -> None:
    """The others do not wait for its parameters."""
    module, optimizer = begin()
    train(module, optimizer, range(2))
    if hvd.rank() == 1:
        optimizer.register_step_pre_hook(lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    try:
        train(module, optimizer, range(2, 4))
    except hvd.HorovodInternalError as error:
        assert "rank 1" in str(error), error
        assert not isinstance(error, hvd.StepFailedError)
        assert [len(group["params"]) for group in optimizer.param_groups] == [3, 5]
        print("noticed", flush=True)
        os._exit(4)


def only_some_ranks_shard(hook: bool) -> None:
    """All ranks get an error with both values, and go on."""
    torch.set_num_threads(1)
    hvd.init()
    module = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), sharded=hvd.rank() == 1,
                                         comm_hook=hvd.comm_hooks.AllReduce() if hook else None)
    others = "rank 0" if hvd.size() == 2 else "ranks 0, 2"
    try:
        train(module, optimizer, range(1))
        raise AssertionError("nothing was found")
    except hvd.MismatchError as error:
        assert "ranks disagree about the value of sharded= for the optimizer of " in str(error), error
        assert f": {others}: False; rank 1: True. Pass the same sharded= to DistributedOptimizer" in str(error), error
    del optimizer
    module = model()
    train(module, made("SGD", module, sharded=True), range(2))
    hvd.check_replicas(module.state_dict())


def error_of(kind: type[Exception], act: Callable[[], object]) -> str:
    try:
        act()
    except kind as found:
        return str(found)
    raise AssertionError(f"no {kind.__name__}")


def without_state() -> None:
    """An optimizer without state has all of it on each rank, until it gets some."""
    torch.set_num_threads(1)
    hvd.init()
    module = model()
    plain = torch.optim.SGD([*module.parameters()], lr=0.1)
    optimizer: Any = hvd.DistributedOptimizer(plain, sharded=True)
    train(module, optimizer, range(2))
    state = optimizer.state_dict()
    assert not state["state"] and len(state["param_groups"][0]["params"]) == 8
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
    optimizer.load_state_dict(state)
    train(module, optimizer, range(2, 3))
    assert optimizer.state_dict() == state
    hvd.shutdown()
    hvd.init()
    train(module, optimizer, range(3, 4))
    optimizer.param_groups[0]["momentum"] = 0.9
    train(module, optimizer, range(4, 5))
    assert "has the state of its own parameters only" in error_of(UnsupportedError, optimizer.state_dict)
    optimizer.consolidate_state_dict(to=None)
    assert len(optimizer.state_dict()["state"]) == 8


def saved_parts() -> None:
    """A parameter has a storage of its own size, in the block of its owner."""
    torch.set_num_threads(1)
    hvd.init()
    module = model().to(torch.bfloat16)
    module[2].float()
    optimizer = made("SGD", module, sharded=True)
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    optimizer.add_param_group({"params": [empty]})
    for _ in range(2):
        optimizer.zero_grad()
        sum(each.float().square().sum() for each in (*module.parameters(), empty)).backward()
        optimizer.step()
    for each in (*module.parameters(), empty):
        assert each.untyped_storage().nbytes() == each.numel() * each.element_size()
        assert each.storage_offset() == 0 and each.data_ptr() % 64 == 0
    file = io.BytesIO()
    torch.save(module[6].state_dict(), file)
    assert file.tell() < 2500, file.tell()
    file.seek(0)
    assert all(map(torch.equal, torch.load(file).values(), module[6].state_dict().values()))
    hvd.check_replicas(module.state_dict())


def memory() -> tuple[list[dict[str, int]], str, str]:
    """Return a report with equal parts, and the texts of it and of one with a parameter that is larger than all others."""
    torch.set_num_threads(1)
    hvd.init()
    texts = []
    for width in (100, 10_000):
        module = torch.nn.Sequential(*(torch.nn.Linear(100, 100, bias=False) for _ in range(4)),
                                     torch.nn.Linear(100, width, bias=False))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(module.parameters()), module.named_parameters(), sharded=True)
        hvd.broadcast_parameters(module.state_dict(), 0)
        module(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        report = hvd.memory_report(module, optimizer)
        texts.append(str(report))
        if width == 100:
            first = list(report.ranks)
    return first, texts[0], texts[1]


class Bare(torch.optim.Optimizer):
    """Has tensors as state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            if each.grad is not None:
                self.state[each] = self.state.get(each, 0) * 0.9 + each.grad
                each.sub_(self.state[each], alpha=0.1)


def unusual_parameters_and_state() -> None:
    """Parameters without a shape yet, and between each other in memory; state that is no dict; state for a second world."""
    torch.set_num_threads(1)
    hvd.init()
    ways = {}
    for sharded in (False, True):
        module = model()
        both = torch.arange(36.0).view(6, 6)
        columns = [torch.nn.Parameter(both[:, :2]), torch.nn.Parameter(both[:, 2:])]
        lazy = torch.nn.LazyLinear(1)
        plain = Bare([*module.parameters(), *columns, *lazy.parameters()])
        optimizer: Any = hvd.DistributedOptimizer(plain, sharded=sharded)
        for step in range(4):
            optimizer.zero_grad()
            torch.manual_seed(step)
            extra = lazy(torch.cat([*columns], 1)).sum() if step > 1 else sum(each.square().sum() for each in columns)
            (module(torch.ones(2, 2, 4, 4) * (1 + hvd.rank())).square().mean() + 0.01 * extra).backward()
            optimizer.step()
        ways[sharded] = torch.nn.ModuleList([module, torch.nn.ParameterList(columns)]), optimizer
    (module, optimizer), (other, whole) = ways[True], ways[False]
    assert same(module, other)
    optimizer.consolidate_state_dict(to=None)
    state = copy.deepcopy(optimizer.state_dict())
    assert len(state["state"]) == 12
    for between in (True, False):
        hvd.shutdown()
        if between:
            optimizer.load_state_dict(state)
        hvd.init()
        if not between:
            optimizer.load_state_dict(state)
        train(module[0], optimizer, range(1))
        optimizer.consolidate_state_dict(to=None)
        state = copy.deepcopy(optimizer.state_dict())
        train(other[0], whole, range(1))
    assert same(module, other)
