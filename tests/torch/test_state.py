"""Optimizer state and buffers that are taken over from another rank are that rank's, bit by bit and dtype by dtype."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch as hvd  # noqa: E402
from hvdlite import api  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.collectives import broadcasts  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.mirroring import strategy_on  # noqa: E402
from tests.torch.models import net  # noqa: E402
from tests.worlds import threads  # noqa: E402


class WideMoments(torch.optim.Optimizer):
    """Keeps float32 moments of bfloat16 parameters, in nested state, as many optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "scale": torch.tensor(1.0, dtype=torch.float64)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own = self.state[parameter]
                if not own:
                    own["step"] = torch.zeros((), dtype=torch.float64)
                    own["moments"] = {"first": torch.zeros_like(parameter, dtype=torch.float32)}
                    own["history"] = [torch.zeros_like(parameter, dtype=torch.float64)]
                    own["mask"] = torch.ones(parameter.shape, dtype=torch.bool)
                own["step"] += 1
                own["moments"]["first"].mul_(0.9).add_(parameter.grad.float())
                own["history"][0].add_(parameter.grad.double())
                parameter.add_(-group["lr"] * own["moments"]["first"].to(parameter.dtype))


def train(model: Any, optimizer: Any, steps: int, rank: int = 0) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank)).bfloat16()
        model(x).square().mean().backward()
        optimizer.step()


def tensors(model: Any, optimizer: Any) -> list[Any]:
    own = [optimizer.state[parameter] for parameter in model.parameters()]
    return [*(parameter.detach() for parameter in model.parameters()),
            *(leaf for each in own for leaf in (each["step"], each["moments"]["first"], each["history"][0], each["mask"]))]


def check_equal(ranks: list[list[Any]]) -> None:
    dtypes = {str(tensor.dtype) for tensor in ranks[0]}
    assert dtypes == {"torch.bfloat16", "torch.float32", "torch.float64", "torch.bool"}
    for first, *others in zip(*ranks, strict=True):
        assert all(other.dtype is first.dtype and torch.equal(first, other) for other in others)


def test_state_keeps_its_dtypes_when_it_is_broadcast() -> None:
    def step(runtime: Runtime) -> list[Any]:
        model = net().bfloat16()
        optimizer = WideMoments(model.parameters())
        if runtime.world.rank == 0:
            train(model, optimizer, 3)
        broadcasts.take_over(runtime, optimizer, 0)
        taken = [tensor.clone() for tensor in tensors(model, optimizer)]
        wrap_optimizer(optimizer, runtime=runtime)
        train(model, optimizer, 2, runtime.world.rank)
        return [*taken, *tensors(model, optimizer), optimizer.param_groups[0]["scale"]]
    check_equal(threads(3, step))


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_state_keeps_its_dtypes_when_ranks_join(op: str) -> None:
    def step(runtime: Runtime) -> list[Any]:
        model = net().bfloat16()
        optimizer = wrap_optimizer(WideMoments(model.parameters()), op=getattr(hvd, op), runtime=runtime)
        with optimizer.join():
            train(model, optimizer, 2 + runtime.world.rank, runtime.world.rank)
        return tensors(model, optimizer)
    check_equal(threads(2, step))


def test_state_keeps_its_dtypes_in_a_scope() -> None:
    def step(runtime: Runtime) -> list[Any]:
        strategy = strategy_on(runtime)
        with strategy.scope():
            model = net().bfloat16()
            optimizer = WideMoments(model.parameters())
        train(model, optimizer, 2, runtime.world.rank)
        strategy.mirror()
        return tensors(model, optimizer)
    check_equal(threads(2, step))


def test_what_torch_itself_converts_stays_converted() -> None:
    """Adam with `capturable` or `fused` has its step count in float32; nothing else is touched either."""
    def step(runtime: Runtime) -> list[Any]:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        lbfgs = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(3))], max_iter=2)
        found = []
        for optimizer in (torch.optim.Adam([parameter], fused=True), lbfgs):
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.grad = torch.ones_like(each)
            if runtime.world.rank == 0:
                optimizer.step(lambda: torch.ones(()))
            broadcasts.take_over(runtime, optimizer, 0)
            (own,) = optimizer.state.values()
            found += [own[key] for key in sorted(own)]
        return found
    one, other = threads(2, step)
    for mine, theirs in zip(one, other, strict=True):
        assert type(mine) is type(theirs)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_the_buffers_of_a_model_come_from_the_last_rank_too() -> None:
    """What is in no optimizer comes with the model: running statistics, frozen layers. Nothing does without it."""
    def step(runtime: Runtime) -> list[list[Any]]:
        found = []
        for given in (True, False):
            model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
            head = torch.nn.Linear(4, 1).requires_grad_(False)
            optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime)
            with optimizer.join(*(model, head) if given else ()) as joined:
                for number in range(2 + runtime.world.rank):
                    optimizer.zero_grad()
                    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number + 9 * runtime.world.rank))
                    head(model(x)).square().mean().backward()
                    optimizer.step()
            assert joined.last_rank == 2
            found.append([*model.parameters(), *head.parameters(), *model.buffers()])
        with pytest.raises(TypeError), optimizer.join(False):  # type: ignore[arg-type]
            pass
        return found
    ranks = threads(3, step)
    for first, *others in zip(*(found[0] for found in ranks), strict=True):
        assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(ranks[0][1][-2], ranks[2][1][-2])


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(runtime: Runtime) -> None:
        monkeypatch.setattr(api, "runtime", lambda: runtime)
        model = net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with optimizer.join(model) as joined:
            pass
        assert joined.last_rank == 0
        hvd.broadcast_optimizer_state(optimizer, 0, model=model)
    threads(1, step)
