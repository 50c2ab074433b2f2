"""Replicas that drift apart are noticed, by name and rank; runs that must be repeatable are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch as hvd  # noqa: E402
from hvdlite.core.errors import ReplicaMismatchError  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite.training.replicas import VALUES, FirstComparison, check_replicas  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.programs import replicas as programs  # noqa: E402
from tests.worlds import TORCH, processes, threads  # noqa: E402


def test_what_differs_is_named_with_its_ranks() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        tensors = {"a": torch.ones(3, 2), "b": torch.tensor(1.5), "c": torch.zeros(0),
                   "d": torch.ones(4, dtype=torch.int8)}
        named = [(name, tensor.numpy()) for name, tensor in tensors.items()]
        check_replicas(runtime, named, "same")
        if rank == 2:
            tensors["b"] += 1e-6
            tensors["d"][3] = 7
        told = r"differ in 'b' and 1 of the other 3 tensors: ranks 0, 1: digest \w+; rank 2: digest"
        with pytest.raises(ReplicaMismatchError, match=told):
            check_replicas(runtime, named, "different")
        with pytest.raises(ReplicaMismatchError, match=r"'b' of rank 0: missing; ranks 1, 2: there"):
            check_replicas(runtime, named[:1] if rank == 0 else named, "uneven")
        runtime.barrier("goes on").wait()
    threads(3, step)


def test_an_optimizer_checks_its_parameters_every_n_steps() -> None:
    def step(runtime: Runtime) -> int:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                       runtime=runtime)
        for turn in range(10):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            if turn == 4 and runtime.world.rank == 1:
                with torch.no_grad():
                    model[1].weight[0, 0] += 1
            try:
                optimizer.step()
            except ReplicaMismatchError as error:
                assert "'1.weight'" in str(error)
                return turn
        return -1
    assert threads(2, step, replica_check_steps=3) == [5, 5]


def test_the_public_call() -> None:
    processes(2, programs.the_public_call, imported=TORCH)


def layouts(**config: Any) -> list[list[tuple[str, ...]]]:
    """Train with hooks that come in another order on each rank; return the buckets' members as every rank knows them."""
    def step(runtime: Runtime) -> list[tuple[str, ...]]:
        parameters = [torch.nn.Parameter(torch.ones(20)) for _ in range(6)]
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.1), runtime=runtime)
        order = parameters if runtime.world.rank == 0 else parameters[3:] + parameters[:3]
        for _ in range(4):
            optimizer.zero_grad()
            torch.stack([parameter.sum() for parameter in order]).sum().backward()
            optimizer.step()
        layout = runtime.gradients.layout("torch.optimizer.0", 1 << 20)
        runtime.barrier("both have it").wait()  # a rank that leaves takes it away
        assert layout is not None
        return [tuple(member.name for member in bucket.members) for bucket in layout.layout.buckets]
    return threads(2, step, bucket_edge=200, bucket_size=200, **config)


def test_deterministic_layouts_follow_one_ranks_order() -> None:
    for _ in range(3):
        found = layouts(deterministic=True)
        members = [name for bucket in found[0] for name in bucket]
        assert found[0] == found[1] and members == sorted(members, reverse=True) and len(found[0]) > 1


def test_state_that_is_taken_over_keeps_its_strides() -> None:
    """Else bfloat16 is rounded differently on the ranks that took it over, and replicas drift apart."""
    def step(runtime: Runtime) -> list[Any]:
        values = torch.linspace(-2, 2, 576).reshape(9, 64).to(torch.bfloat16)
        parameter = torch.nn.Parameter(values.t())
        optimizer = wrap_optimizer(torch.optim.SGD([parameter], lr=0.05, momentum=0.9, weight_decay=0.01),
                                       runtime=runtime)

        def train(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                (parameter.float().sin() * (runtime.world.rank + 1)).sum().backward()
                optimizer.step()
        with optimizer.join():
            train(3 + runtime.world.rank)
        train(9)
        return [parameter.detach(), optimizer.state[parameter]["momentum_buffer"]]
    (one, state), (other, taken) = threads(2, step)
    assert state.stride() == taken.stride() == one.stride() == (1, 64)
    assert torch.equal(one, other)


def trained(caplog: pytest.LogCaptureFixture, lines: Callable[[int, torch.nn.Module], None] = lambda rank, model: None,
            **arguments: Any) -> str:
    """Train on two ranks for four steps, with other weights on each rank; return what was logged.

    Args:
        lines: run before the first step.
        arguments: of `DistributedOptimizer`.
    """
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)))

    def step(runtime: Runtime) -> None:
        model = models[runtime.world.rank]
        lines(runtime.world.rank, model)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                       runtime=runtime, **arguments)
        for turn in range(4):
            optimizer.zero_grad()
            model(torch.rand(3, 4) + runtime.world.rank + turn).sum().backward()
            optimizer.step()
            runtime.barrier("the answer is here").wait()
    caplog.set_level("WARNING", "hvdlite")
    threads(2, step)
    return caplog.text


def equal_start(rank: int, model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_missing_broadcast_is_told_once_with_the_line(caplog: pytest.LogCaptureFixture, op: hvd.ReduceOp) -> None:
    text = trained(caplog, op=op)
    assert text.count("train different models") == 1
    assert "'0.bias' and 3 of the other 5 tensors (a value of rank 0: " in text
    assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in text


def test_equal_replicas_are_not_told_of_whatever_their_buffers_are(caplog: pytest.LogCaptureFixture) -> None:
    assert trained(caplog, equal_start) == ""


def test_replicas_that_other_processors_have_rounded_are_equal(caplog: pytest.LogCaptureFixture) -> None:
    def lines(rank: int, model: torch.nn.Module) -> None:
        equal_start(rank, model)
        with torch.no_grad():
            model[0].weight += 1e-6 * rank
            model[2].bias[0] = float("nan")
    assert trained(caplog, lines) == ""


def test_frozen_parameters_may_differ(caplog: pytest.LogCaptureFixture) -> None:
    def lines(rank: int, model: torch.nn.Module) -> None:
        own = model[0].weight.detach().clone()
        equal_start(rank, model)
        model[0].weight.requires_grad_(False).data.copy_(own)
    assert trained(caplog, lines) == ""


def test_ranks_without_batches_are_left_out_of_the_first_comparison(caplog: pytest.LogCaptureFixture) -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 1:
            runtime.join().wait()
            return
        named, values = [("a", "float32"), ("b", "float32")], np.full((2, VALUES), float(runtime.world.rank), np.float32)
        comparison = FirstComparison(runtime, named, values, "check", 0, "the line")
        assert comparison.report(10.0)
        runtime.join().wait()
    caplog.set_level("WARNING", "hvdlite")
    threads(3, step)
    assert "in 'a' and 1 of the other 1 tensors (a value of rank 0: 0; rank 2: 2)" in caplog.text


def compared(caplog: pytest.LogCaptureFixture, tensors: Callable[[int], dict[tuple[str, str], float]]) -> str:
    """Compare tensors of one value on two ranks; return what was logged.

    Args:
        tensors: returns a rank's values, by name and dtype.
    """
    def step(runtime: Runtime) -> None:
        own = tensors(runtime.world.rank)
        values = np.array([[value] * VALUES for value in own.values()], np.float32)
        assert FirstComparison(runtime, list(own), values, "check", 0, "the line").report(10.0)
        runtime.barrier("both have it").wait()
    caplog.set_level("WARNING", "hvdlite")
    threads(2, step)
    return caplog.text


def test_tensors_in_another_order_are_compared_by_their_names(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (("b", "float32"), 2.0), (("a", "float32"), 1.0)
    assert compared(caplog, lambda rank: dict([first, second] if rank else [second, first])) == ""
    assert "in 'b' (" in compared(caplog, lambda rank: dict([(first[0], 3.0), second] if rank else [second, first]))


def test_tensors_of_other_names_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    assert compared(caplog, lambda rank: {("b" if rank else "a", "float32"): float(rank)}) == ""


@pytest.mark.parametrize(("dtype", "value", "is_told"), [
    ("bfloat16", 1 + 2.0 ** -7, False), ("bfloat16", 1.1, True), ("float16", 1 + 2.0 ** -9, False),
    ("float32", 1 + 2.0 ** -9, True), ("float8_e5m2", 1.25, False)])
def test_the_last_bit_of_a_short_dtype_may_differ(caplog: pytest.LogCaptureFixture, dtype: str, value: float,
                                                  is_told: bool) -> None:
    assert bool(compared(caplog, lambda rank: {("a", dtype): value if rank else 1.0})) is is_told


def test_a_rank_that_leaves_the_first_comparison_out_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 0:
            FirstComparison(runtime, [("a", "float32")], np.ones((1, VALUES), np.float32), "check", 0, "the line")
        time.sleep(1.5)
        runtime.barrier("goes on").wait()
    caplog.set_level("WARNING", "hvdlite")
    threads(2, step, stall_check_time_seconds=0.2, stall_shutdown_time_seconds=0.4)
    assert "check" not in caplog.text
