"""Gradients averaged by what ranks count: `optimizer.set_weight`, against one process that has all ranks' samples."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import UnsupportedError  # noqa: E402
from hvdlite.core.process_set import ProcessSet  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import Compression  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import by_bucket, net, weights  # noqa: E402
from tests.worlds import threads  # noqa: E402

TURNS = 8
ALL_ZERO = 5
"""A turn in which no rank counts anything."""
SMALL = (0, 1, 2, 5, 17)


@dataclasses.dataclass
class Side:
    """One rank, or the process that has all ranks' samples.

    Attributes:
        rank: None for the latter.
        passes: of a step.
    """

    rank: int | None
    size: int
    passes: int
    optimizer: Any
    model: Any
    scaler: Any = None

    def counts(self, turn: int, number: int) -> list[int]:
        """Return how many samples each rank has in a pass, the first rank some unless there are none at all."""
        draw = random.Random(f"{turn} {number}")
        return [draw.choice(SMALL[index == 0:]) * (turn != ALL_ZERO) for index in range(self.size)]

    def count(self, turn: int, number: int = 0) -> int:
        assert self.rank is not None
        return self.counts(turn, number)[self.rank]

    def mean(self, turn: int, number: int, rank: int, model: Any = None) -> Any:
        """Return a rank's loss, a mean over its samples."""
        generator = torch.Generator().manual_seed(1000 * turn + 10 * number + rank)
        dtype = next(self.model.parameters()).dtype
        x = torch.randn(max(1, self.counts(turn, number)[rank]), 6, generator=generator, dtype=dtype)
        return (model or self.model)(x).square().mean()

    def losses(self, turn: int) -> list[Any]:
        """Return the losses of a step's backward passes: of one process, a single one, or none."""
        if self.rank is not None:
            own = [self.mean(turn, number, self.rank) for number in range(self.passes)]
            return [loss * math.nan if not self.count(turn, number) else loss for number, loss in enumerate(own)]
        pairs = [(count, self.mean(turn, number, rank)) for number in range(self.passes)
                 for rank, count in enumerate(self.counts(turn, number)) if count]
        total = sum(count for count, _ in pairs)
        return [self.passes * sum(count * loss for count, loss in pairs) / total] if pairs else []

    def backward(self, turn: int) -> bool:
        """Make a step's backward passes; return whether there are any samples."""
        losses = self.losses(turn)
        for number, loss in enumerate(losses):
            if self.rank is not None:
                self.optimizer.set_weight(self.count(turn, number))
            loss.backward()
        return bool(losses)


def plainly(side: Side, turn: int) -> None:
    side.optimizer.zero_grad()
    if side.backward(turn):
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
        side.optimizer.step()


def not_clearing_first(side: Side, turn: int) -> None:
    if side.backward(turn):
        side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=turn % 2 == 0)


def in_no_sync(side: Side, turn: int) -> None:
    side.optimizer.zero_grad()
    losses = side.losses(turn)
    for number, loss in enumerate(losses):
        if side.rank is None:
            loss.backward()
            continue
        side.optimizer.set_weight(side.count(turn, number))
        if number + 1 < len(losses):
            with side.optimizer.no_sync():
                loss.backward()
        else:
            loss.backward()
    if losses:
        side.optimizer.step()


def with_idle_ranks(side: Side, turn: int) -> None:
    """Ranks without samples make no backward pass; every other time they do not call `set_weight` either."""
    side.optimizer.zero_grad()
    if side.rank is None or side.count(turn):
        if not side.backward(turn) and side.rank is None:
            return
    elif turn % 2 or turn < 2:
        side.optimizer.set_weight(0)
    side.optimizer.step()


def with_a_scaler(side: Side, turn: int) -> None:
    """In one turn the loss of rank 0 is infinite, so no rank steps."""
    side.scaler = side.scaler or torch.amp.GradScaler("cpu", init_scale=1024.0)
    side.optimizer.zero_grad()
    losses = side.losses(turn)
    for number, loss in enumerate(losses):
        if side.rank is not None:
            side.optimizer.set_weight(side.count(turn, number))
        infinite = turn == 3 and not side.rank
        side.scaler.scale(loss * math.inf if infinite else loss).backward()
    if losses:
        side.scaler.unscale_(side.optimizer)
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
        side.scaler.step(side.optimizer)
        side.scaler.update()


def with_own_gradients(side: Side, turn: int) -> None:
    """By `torch.autograd.grad`: all of them, or some, together with a backward pass over the others."""
    side.optimizer.zero_grad()
    parameters, losses = list(side.model.parameters()), side.losses(turn)
    own = parameters if turn % 2 else parameters[:2]
    for loss in losses:
        if side.rank is not None:
            side.optimizer.set_weight(side.count(turn))
        for parameter, gradient in zip(own, torch.autograd.grad(loss, own, retain_graph=True), strict=True):
            parameter.grad = gradient
        if len(own) < len(parameters):
            loss.backward(inputs=parameters[2:])
    if losses:
        side.optimizer.step()


def with_a_closure(side: Side, turn: int) -> None:
    if turn == ALL_ZERO:
        return

    def closure() -> Any:
        side.optimizer.zero_grad()
        [loss] = side.losses(turn)
        if side.rank is not None:
            side.optimizer.set_weight(side.count(turn))
        loss.backward()
        return loss
    side.optimizer.step(closure)


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)


def lbfgs(model: Any) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")


def sparse_net() -> Any:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2)
            for index, parameter in enumerate(self.parameters()):
                generator = torch.Generator().manual_seed(index)
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

        def forward(self, x: Any) -> Any:
            return self.layer(self.embedding((x[:, :3].abs() * 10).long() % 9).sum(1))
    return Net()


Turn = Callable[[Side, int], None]


def compare(turn: Turn, *, size: int = 2, passes: int = 1, make: Callable[[Any], Any] = sgd, model: Callable[[], Any] = net,
            tolerance: float = 1e-12, **options: Any) -> None:
    """Run turns on ranks, whose parameters must be equal, and those of one process; the optimizers' state too."""
    def run(rank: int | None, wrap: Callable[[Any], Any]) -> list[Any]:
        own = model().double()
        side = Side(rank, size, passes, wrap(make(own)), own)
        for number in range(TURNS):
            turn(side, number)
        state = [value for each in side.optimizer.state.values() for value in each.values() if make is not lbfgs]
        return weights(own) + [value.detach().clone() for value in state if isinstance(value, torch.Tensor)]

    def step(runtime: Runtime) -> list[Any]:
        return run(runtime.world.rank, lambda plain: wrap_optimizer(plain, runtime=runtime, **options))
    expected, (first, *others) = run(None, lambda plain: plain), threads(size, step)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True)), "the ranks differ"
    for own, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wait_in", ["backward", "step"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("turn", "passes"), [(plainly, 1), (plainly, 3), (not_clearing_first, 1), (not_clearing_first, 2)])
def test_equal_to_one_process(turn: Turn, passes: int, size: int, wait_in: str) -> None:
    for make in (sgd, adam):
        compare(turn, passes=passes, size=size, make=make, wait_in=wait_in, backward_passes_per_step=passes)


@pytest.mark.parametrize("wait_in", ["backward", "step"])
@pytest.mark.parametrize(("turn", "passes"), [(in_no_sync, 3), (with_idle_ranks, 1), (with_own_gradients, 1),
                                              (with_a_scaler, 1)])
def test_equal_to_one_process_where_passes_differ(turn: Turn, passes: int, wait_in: str) -> None:
    compare(turn, passes=passes, wait_in=wait_in)


def test_a_scaler_and_several_passes() -> None:
    compare(with_a_scaler, passes=2, backward_passes_per_step=2, make=adam)


def test_closures_and_losses_that_steer() -> None:
    compare(with_a_closure)
    compare(with_a_closure, make=lbfgs, tolerance=1e-9)


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"gradient_predivide_factor": 2.0}])
def test_sparse_gradients(options: Any) -> None:
    compare(plainly_unclipped, passes=2, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), model=sparse_net,
            backward_passes_per_step=2, **options)


def plainly_unclipped(side: Side, turn: int) -> None:
    side.optimizer.zero_grad()
    if side.backward(turn):
        side.optimizer.step()


@pytest.mark.parametrize(("compression", "tolerance"), [(Compression.fp16, 2e-3), (Compression.bf16, 2e-2)])
def test_compressed_gradients(compression: Any, tolerance: float) -> None:
    compare(plainly, compression=compression, tolerance=tolerance)


@pytest.mark.parametrize("groups", [2, None])
def test_in_learned_buckets(groups: Any) -> None:
    compare(plainly, groups=groups)
    ranks = threads(2, lambda runtime: _learned(runtime))
    assert ranks == [True, True]


def _learned(runtime: Runtime) -> bool:
    model = net()
    optimizer = wrap_optimizer(sgd(model), runtime=runtime)
    for _ in range(5):
        optimizer.set_weight(runtime.world.rank + 1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    return by_bucket(optimizer)


def test_equal_weights_give_the_bits_that_there_are_without() -> None:
    def step(runtime: Runtime) -> list[Any]:
        found = []
        for weight in (None, 64):
            model = net()
            optimizer = wrap_optimizer(sgd(model), runtime=runtime)
            for turn in range(6):
                if weight:
                    optimizer.set_weight(weight)
                model(torch.full((2, 6), 0.1 * runtime.world.rank + turn)).square().mean().backward()
                optimizer.step()
            found.append(weights(model))
        return found
    for without, equal in threads(2, step):
        assert all(torch.equal(one, other) for one, other in zip(without, equal, strict=True))


def test_join_and_the_next_epoch() -> None:
    """A rank that has joined has weight 0, and its unit is found anew afterwards."""
    lengths, epochs = (2, 5), 3

    def loss(model: Any, epoch: int, turn: int, rank: int) -> tuple[int, Any]:
        count = 1 + (7 * epoch + 3 * turn + 2 * rank) % 5
        generator = torch.Generator().manual_seed(100 * epoch + 10 * turn + rank)
        x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        return count, model(x).square().mean()

    def step(runtime: Runtime) -> list[Any]:
        model, rank = net().double(), runtime.world.rank
        optimizer = wrap_optimizer(sgd(model), runtime=runtime)
        for epoch in range(epochs):
            with optimizer.join():
                for turn in range(lengths[rank]):
                    optimizer.zero_grad()
                    count, own = loss(model, epoch, turn, rank)
                    optimizer.set_weight(count)
                    own.backward()
                    optimizer.step()
        return weights(model)
    model = net().double()
    plain = sgd(model)
    for epoch in range(epochs):
        for turn in range(max(lengths)):
            plain.zero_grad()
            pairs = [loss(model, epoch, turn, rank) for rank in range(2) if turn < lengths[rank]]
            (sum(count * own for count, own in pairs) / sum(count for count, _ in pairs)).backward()
            plain.step()
    for result in threads(2, step):
        for own, wanted in zip(result, weights(model), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)


def test_in_a_process_set() -> None:
    """The third rank trains alone, without weights."""
    def step(runtime: Runtime) -> list[Any]:
        own, pair = net().double(), ProcessSet([0, 1])
        pair.process_set_id = runtime.add_process_set([0, 1]).wait()
        optimizer = wrap_optimizer(sgd(own), runtime=runtime, process_set=pair)
        side = Side(runtime.world.rank, 2, 1, optimizer, own)
        if runtime.world.rank == 2:
            with pytest.raises(UnsupportedError, match="this rank trains alone"):
                optimizer.set_weight(1)
            return []
        for turn in range(TURNS):
            plainly(side, turn)
        return weights(own)
    model = net().double()
    side = Side(None, 2, 1, sgd(model), model)
    for turn in range(TURNS):
        plainly(side, turn)
    for own, wanted in zip(threads(3, step)[0], weights(model), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
