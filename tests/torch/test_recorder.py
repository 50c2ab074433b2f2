"""Small gradients of learned buckets, which a hook in C records and which are handed over together."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import DistributedOptimizer, comm_hooks  # noqa: E402
from hvdlite_torch.gradients.recorder import Recorder  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import net, reducer_of, train, wrapped  # noqa: E402
from tests.torch.one_process import Case, compare  # noqa: E402
from tests.worlds import threads  # noqa: E402


def test_a_recorder_calls_python_unless_it_records() -> None:
    called: list[torch.Tensor] = []
    recorder = Recorder(called.append)
    recorder.hook.owner = weakref.ref(recorder)  # type: ignore[attr-defined]
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    handles = {id(parameter): parameter.register_post_accumulate_grad_hook(called.append) for parameter in parameters}
    small = frozenset(map(id, parameters[:2]))
    recorder.record_only(small, [id(parameters[1])], handles)

    def accumulate() -> None:
        called.clear()
        torch.autograd.backward([parameter.sum() for parameter in parameters])

    accumulate()
    assert len(called) == 3 and recorder.parameters == []
    recorder.start()
    accumulate()
    assert {id(parameter) for parameter in called} == {id(parameters[1]), id(parameters[2])}
    assert [id(parameter) for parameter in recorder.take()] == [id(parameters[0])] and recorder.parameters == []
    recorder.stop()
    accumulate()
    assert len(called) == 3 and recorder.parameters == [] and recorder.hook.owner() is recorder  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_hook", [False, True])
def test_a_learned_buckets_small_gradients_and_those_of_a_hook_are_handed_over_together(has_hook: bool) -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model, comm_hook=comm_hooks.AllReduce() if has_hook else None)
        for _ in range(3):
            train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
        reducer, calls = reducer_of(optimizer), []
        reducer.accumulated = calls.append
        for _ in range(3):
            train(optimizer, model, torch.ones(4, 6), torch.ones(4, 3))
        assert calls == [] and reducer.layout.is_used is not has_hook
    threads(2, step)


def layers_in_a_changing_order(case: Case) -> None:
    """With parts of the layers in some turns, so that the gradient that was the last one does not come, or comes early."""
    layers = [torch.nn.Linear(6, 6) for _ in range(4)]
    for number, layer in enumerate(layers):
        torch.nn.init.constant_(layer.weight, 0.1 + 0.01 * number)
        torch.nn.init.zeros_(layer.bias)
    case.model.extend(layers)
    optimizer = case.optimizer()
    for turn in range(12):
        optimizer.zero_grad()
        order = [layers[(turn + place) % 4] for place in range(4 if turn % 3 else 2)]
        case.loss(turn, lambda x, order=order: torch.nn.Sequential(*order, *case.model[:3])(x)).backward()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
        optimizer.step()


@pytest.mark.parametrize("size", [512, 1 << 20])
def test_gradients_in_a_changing_order(size: int) -> None:
    compare([layers_in_a_changing_order], bucket_size=size, bucket_edge=size)


def test_gradients_of_a_hook_in_a_changing_order() -> None:
    compare([layers_in_a_changing_order], lambda rank: {"comm_hook": comm_hooks.AllReduce()})


def test_two_optimizers_with_the_same_parameters_reduce_gradients_once() -> None:
    def step(runtime: Runtime) -> list[float]:
        parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(4)]

        def made() -> DistributedOptimizer:
            return wrap_optimizer(torch.optim.SGD(parameters, lr=1.0),
                                  [(str(number), parameter) for number, parameter in enumerate(parameters)],
                                  op=ReduceOp.SUM, runtime=runtime)

        def train_with(clears: DistributedOptimizer, steps: DistributedOptimizer) -> None:
            clears.zero_grad()
            sum(parameter.sum() for parameter in parameters).backward()
            steps.step()

        optimizers = [made(), made()]
        for optimizer in optimizers:
            for _ in range(5):
                train_with(optimizer, optimizer)
        before = [parameter.detach().clone() for parameter in parameters]
        train_with(optimizers[1], optimizers[0])
        return [float((old - new.detach())[0]) for old, new in zip(before, parameters, strict=True)]
    assert threads(2, step) == [[2.0] * 4] * 2
