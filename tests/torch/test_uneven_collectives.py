"""Collectives inside a loss, in uneven batches of a scope: gradients from other ranks have those ranks' weights."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import hvdlite_torch as hvd  # noqa: E402
from hvdlite import api  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.gradients.weights import weighted_later  # noqa: E402
from tests.torch.mirroring import (  # noqa: E402
    Net,
    assert_close,
    dataset,
    strategy_on,
    weights,
)
from tests.worlds import threads  # noqa: E402

BATCHES = [tuple(tensor.double() for tensor in dataset(rows)[:]) for rows in (7, 5, 8, 3)]


class Alone:
    """One process with the whole batch: every collective is the identity, or a reduction over the rows."""

    weight = 1.0

    def gather(self, rows: Any) -> Any:
        return rows

    sum = product = maximum = sum_in_place = scattered = swapped = back = first = gather


class Ranks:
    """The same on ranks that have parts of the batch."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @property
    def weight(self) -> float:
        return self.strategy.weight

    def gather(self, rows: Any) -> Any:
        return hvd.allgather(rows, horovod_gradient=False)

    def sum(self, value: Any) -> Any:
        return hvd.grouped_allreduce([value], op=hvd.Sum)[0]

    def sum_in_place(self, value: Any) -> Any:
        return hvd.allreduce_(value, op=hvd.Sum)

    def product(self, value: Any) -> Any:
        return hvd.allreduce(value, op=hvd.Product)

    def maximum(self, value: Any) -> Any:
        return hvd.allreduce(value, op=hvd.Max)

    def scattered(self, matrix: Any) -> Any:
        part = hvd.reducescatter(matrix, op=hvd.Sum, horovod_gradient=False)
        return hvd.allgather(part, horovod_gradient=False)

    def first(self, rows: Any) -> Any:
        return hvd.broadcast(rows, 0, horovod_gradient=False)

    def swapped(self, rows: Any) -> Any:
        """Give the other rank all rows."""
        moved, self._received = hvd.alltoall(rows, [0, len(rows)] if hvd.rank() == 0 else [len(rows), 0])
        return moved

    def back(self, rows: Any) -> Any:
        return hvd.alltoall(rows, self._received.tolist())[0]


def with_allgather(model: Any, x: Any, y: Any, over: Any) -> Any:
    own = model(x)
    return torch.logsumexp(own @ over.gather(own).T, 1).mean()


def with_allreduce(model: Any, x: Any, y: Any, over: Any) -> Any:
    own = model(x)
    return (own * over.sum(own.sum(0)) + over.sum_in_place(own.square().sum(0))).square().mean()


def with_extremes(model: Any, x: Any, y: Any, over: Any) -> Any:
    own = model(x)
    return (own * over.product(own.prod(0)) + over.maximum(own.amax(0)) * y).square().mean()


def with_reducescatter(model: Any, x: Any, y: Any, over: Any) -> Any:
    own = model(x)
    return (own @ over.scattered(own.T @ own)).square().mean()


def with_alltoall(model: Any, x: Any, y: Any, over: Any) -> Any:
    hidden = over.swapped(model.layers[:2](x))
    return (over.back(model.layers[2](hidden)) - y).square().mean()


def with_broadcast(model: Any, x: Any, y: Any, over: Any) -> Any:
    own = model(x)
    return (own * over.first(own[:1])).square().mean()


def with_penalty(model: Any, x: Any, y: Any, over: Any) -> Any:
    """The penalty's own pass returns gradients of the input: it has no weights."""
    x = x.clone().requires_grad_()
    own = model(x)
    gradient, = torch.autograd.grad((own * over.sum(own.sum(0))).sum(), x, create_graph=True)
    return gradient.square().sum(1).mean()


def with_inner_step(model: Any, x: Any, y: Any, over: Any) -> Any:
    """As MAML: a pass that returns gradients of parameters, which are averaged, inside of the loss."""
    own = model(x)
    inner = (own * over.sum(own.sum(0)) - y).square().mean()
    gradients = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
    mean = [each if isinstance(over, Alone) else hvd.allreduce(each * over.weight) for each in gradients]
    changed = {name: parameter - 0.1 * each for (name, parameter), each in zip(model.named_parameters(), mean, strict=True)}
    return (torch.func.functional_call(model, changed, (x,)) - y).square().mean()


def in_a_reentrant_checkpoint(model: Any, x: Any, y: Any, over: Any) -> Any:
    """Inside of it there are no parameters."""
    return checkpoint(lambda own: own * over.sum(own.sum(0)), model(x), use_reentrant=True).square().mean()


LOSSES = [with_allgather, with_allreduce, with_extremes, with_reducescatter, with_alltoall, with_broadcast, with_penalty,
          with_inner_step, in_a_reentrant_checkpoint]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], list[Any]]:
    """Run a step on two ranks that are threads; it is called with a strategy."""
    current = threading.local()
    monkeypatch.setattr(api.worlds(), "current", lambda: current.runtime)

    def run(step: Callable[[Any], Any]) -> list[Any]:
        def with_runtime(runtime: Runtime) -> Any:
            current.runtime = runtime
            return step(strategy_on(runtime))
        return threads(2, with_runtime)
    return run


def trained(loss: Any, scope: Any, batches: Iterator[Any], over: Any, differentiate: Callable[..., None]) -> list[Any]:
    with scope:
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches:
        optimizer.zero_grad()
        differentiate(loss(model, x, y, over), model)
        optimizer.step()
    return weights(model)


def backward(loss: Any, model: Any) -> None:
    loss.backward()


def grad(loss: Any, model: Any) -> None:
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        parameter.grad = gradient


def test_losses_with_collectives_equal_one_process(on_ranks: Any) -> None:
    cases = [(loss, way) for loss in LOSSES for way in (backward, grad)
             if (loss, way) != (in_a_reentrant_checkpoint, grad)]  # which torch refuses
    expected = [trained(loss, contextlib.nullcontext(), iter(BATCHES), Alone(), way) for loss, way in cases]

    def step(strategy: Any) -> list[list[Any]]:
        return [trained(loss, strategy.scope(), strategy.distribute(BATCHES), Ranks(strategy), way) for loss, way in cases]
    for everything in on_ranks(step):
        for (loss, way), got, wanted in zip(cases, everything, expected, strict=True):
            assert_close(got, wanted, msg=f"{loss.__name__}, {way.__name__}")


def test_gradients_that_are_weighted_after_the_backward_pass(on_ranks: Any) -> None:
    """As by the adapter of Keras; the weights are numbers of samples."""
    x, y = BATCHES[0]

    def gradients(loss: Any, over: Any, rows: slice) -> list[Any]:
        model = Net().double()
        with weighted_later(api.runtime(), len(x[rows]), model.parameters) if rows.stop else contextlib.nullcontext():
            loss(model, x[rows], y[rows], over).backward()
        return [parameter.grad for parameter in model.parameters()]
    expected = [gradients(loss, Alone(), slice(None)) for loss in LOSSES]

    def step(_: Any) -> list[list[Any]]:
        rows = (slice(0, 4), slice(4, 7))[hvd.rank()]
        share = len(x[rows]) / len(x)
        return [[hvd.allreduce(each * share, op=hvd.Sum) for each in
                 gradients(loss, Ranks(SimpleNamespace(weight=2 * share)), rows)] for loss in LOSSES]
    for everything in on_ranks(step):
        for loss, got, wanted in zip(LOSSES, everything, expected, strict=True):
            assert_close(got, wanted, msg=loss.__name__)


def test_sixteen_bits_do_not_overflow_with_the_weight(on_ranks: Any) -> None:
    def step(_: Any) -> float:
        parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
        with weighted_later(api.runtime(), 8 - 4 * hvd.rank(), lambda: [parameter]):
            (hvd.allreduce(parameter, op=hvd.Average) * 30000).sum().backward()
        assert parameter.grad.dtype == torch.float16
        return parameter.grad.item()
    assert on_ranks(step) == [22496, 44992]  # 30000 times (8 + 4) / 2, divided by this rank's weight


def test_passes_without_weighted_parameters_have_no_weights(on_ranks: Any) -> None:
    """Parameters of an optimizer that a script has wrapped itself are not weighted, so nothing is divided either."""
    def step(strategy: Any) -> tuple[float, float, float]:
        with strategy.scope():
            scoped = torch.nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(scoped.parameters(), lr=0.1)
        own, rank = torch.nn.Parameter(torch.ones(())), hvd.rank()
        for (x,) in strategy.distribute([(torch.ones(3, 1),)]):  # with the weights 4/3 and 2/3
            (hvd.allreduce(own, op=hvd.Sum) * (rank + 1)).backward()
            mine = own.grad.item()
            total = hvd.allreduce(scoped(x).sum(), op=hvd.Sum)
            returned, = torch.autograd.grad(total * (rank + 1), scoped.weight)
            y = x.clone().requires_grad_()
            of_input, = torch.autograd.grad(hvd.allreduce(y.sum(), op=hvd.Sum) * (rank + 1), y)
        assert optimizer is not None
        return mine, returned.item() * strategy_weight(rank), of_input.mean().item()

    def strategy_weight(rank: int) -> float:
        return (4 / 3, 2 / 3)[rank]
    first, second = on_ranks(step)
    assert first == pytest.approx((3, 2 * (4 / 3 + 2 * 2 / 3), 3))
    assert second == pytest.approx((3, 1 * (4 / 3 + 2 * 2 / 3), 3))


def test_where_the_weight_is_not_known_there_is_an_error(on_ranks: Any) -> None:
    def step(strategy: Any) -> None:
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = {name: value.detach() for name, value in model.named_parameters()}

        def loss(values: Any, x: Any) -> Any:
            return hvd.allreduce(torch.func.functional_call(model, values, (x,)).sum(), name="total")
        for x, _ in strategy.distribute([dataset(4)[:]]):
            torch.func.grad(loss)(values, x)
        for x, _ in strategy.distribute([dataset(3)[:]]):
            with pytest.raises(hvd.UnsupportedError, match=r"allreduce.total': rank \d .* with torch\.func in a batch"):
                torch.func.grad(loss)(values, x)
        assert optimizer is not None
    on_ranks(step)


def test_each_strategy_has_its_own_weight(on_ranks: Any) -> None:
    def step(strategy: Any) -> tuple[float, float]:
        strategies, models, optimizers = (strategy, strategy_on(api.runtime())), [], []
        for each in strategies:
            with each.scope():
                models.append(torch.nn.Linear(1, 1, bias=False))
                optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.1))
        one, other = models
        for (x,), (y,) in zip(*(each.distribute([(torch.ones(rows, 1),)])
                                for each, rows in zip(strategies, (3, 5), strict=True)), strict=True):
            for model, batch in ((one, x), (other, y)):  # with the weights 4/3 and 2/3; 6/5 and 4/5
                (hvd.allreduce(model(batch).mean(), op=hvd.Sum) * (hvd.rank() + 1)).backward()
            both = hvd.allreduce(one(x).sum() + other(y).sum())
            with pytest.raises(hvd.UnsupportedError, match=r"2 strategies or optimizers have the weights \[\d\.\d*, "):
                both.backward()
        return one.weight.grad.item(), other.weight.grad.item()
    for gradients in on_ranks(step):
        assert gradients == pytest.approx((4 / 3 + 2 * 2 / 3, 6 / 5 + 2 * 4 / 5))
