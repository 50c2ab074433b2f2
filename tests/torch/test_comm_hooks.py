"""Lossy averages: exact where nothing is lost, equal on all ranks, and what is lost comes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import Compression, comm_hooks  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import OPTIMIZERS, batches, losses, net, share, train, weights  # noqa: E402
from tests.worlds import threads  # noqa: E402

EXACT: dict[str, Callable[[], Any]] = {
    "allreduce": comm_hooks.AllReduce,
    "powersgd that does not pay": lambda: comm_hooks.PowerSGD(8, start_iter=0),
    "powersgd of full rank": lambda: comm_hooks.PowerSGD(16, start_iter=1, min_compression_rate=0.0),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", EXACT)
def test_nothing_is_lost_where_nothing_has_to_be(kind: str, size: int) -> None:
    data = list(batches(4, size))
    alone = net()
    optimizer = OPTIMIZERS["adam"](alone.parameters())
    for x, y in data:
        train(optimizer, alone, x, y, clip=True)

    def step(runtime: Runtime) -> list[Any]:
        model = net()
        wrapped = wrap_optimizer(OPTIMIZERS["adam"](model.parameters()), model.named_parameters(),
                                 comm_hook=EXACT[kind](), runtime=runtime)
        for x, y in data:
            train(wrapped, model, share(x, runtime), share(y, runtime), clip=True)
        return weights(model)
    for found in threads(size, step):
        for mine, theirs in zip(found, weights(alone), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_training_converges_and_replicas_stay_equal() -> None:
    def step(runtime: Runtime) -> tuple[list[Any], float, float]:
        model = net()
        wrapped = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(),
                                 comm_hook=comm_hooks.PowerSGD(1, start_iter=2, min_compression_rate=1.0),
                                 runtime=runtime)
        generator = torch.Generator().manual_seed(runtime.world.rank)
        truth = torch.linspace(-1, 1, 18).reshape(6, 3)
        losses = []
        for _ in range(150):
            x = torch.randn(16, 6, generator=generator)
            wrapped.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), x @ truth)
            loss.backward()
            wrapped.step()
            losses.append(loss.item())
        return weights(model), sum(losses[:10]), sum(losses[-10:])
    (one, begin, end), (other, _, _) = threads(2, step)
    assert end < 0.25 * begin, (begin, end)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


def test_other_members_on_another_rank_are_told() -> None:
    def step(runtime: Runtime) -> None:
        first, second = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        (first, second)[runtime.world.rank].requires_grad_(False)
        optimizer = wrap_optimizer(torch.optim.SGD([first, second], lr=0.1), comm_hook=comm_hooks.AllReduce(),
                                   runtime=runtime)
        with pytest.raises(MismatchError, match=r"disagree about the members of 'torch.optimizer.0'.*same parameters"):
            (first + second).sum().backward()
        del optimizer
    threads(2, step)


def test_other_shapes_on_another_rank_are_told() -> None:
    def step(runtime: Runtime) -> None:
        first, second = (torch.nn.Parameter(torch.ones(size)) for size in ((4, 6), (6, 4))[runtime.world.rank])
        optimizer = wrap_optimizer(torch.optim.SGD([first, second], lr=0.1), comm_hook=comm_hooks.AllReduce(),
                                   runtime=runtime)
        with pytest.raises(MismatchError, match=r"disagree about the members of 'torch.optimizer.0'.*of the same shapes"):
            (first.sum() + second.sum()).backward()
        del optimizer
    threads(2, step)


def test_gradients_that_are_missing_or_accumulated() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        used, elsewhere, nowhere = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
        optimizer = wrap_optimizer(torch.optim.SGD([used, elsewhere, nowhere], lr=1.0), backward_passes_per_step=2,
                                   comm_hook=comm_hooks.AllReduce(), runtime=runtime)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                (used.sum() + (elsewhere.sum() if rank else 0)).backward()
            assert used.grad.tolist() == [2] * 3 and elsewhere.grad.tolist() == [1] * 3 and nowhere.grad is None
            optimizer.step()
        assert used.tolist() == [-3] * 3
    threads(2, step)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 has p.grad_dtype")
def test_gradients_of_another_dtype_that_are_missing_on_a_rank() -> None:
    def step(runtime: Runtime) -> None:
        used, elsewhere = (torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)) for _ in range(2))
        used.grad_dtype = elsewhere.grad_dtype = torch.float32
        optimizer = wrap_optimizer(torch.optim.SGD([used, elsewhere], lr=0.0), runtime=runtime,
                                   comm_hook=comm_hooks.PowerSGD(start_iter=2, min_compression_rate=0.0))
        for _ in range(4):
            optimizer.zero_grad()
            (used.sum() + (elsewhere.sum() if runtime.world.rank else 0)).backward()
            assert used.grad.dtype is elsewhere.grad.dtype is torch.float32
            torch.testing.assert_close(elsewhere.grad, torch.full((4, 4), 0.5))
            optimizer.step()
    threads(2, step)


@pytest.mark.parametrize("arguments", [{"op": ReduceOp.SUM}, {"compression": Compression.fp16}, {"groups": 2},
                                       {"gradient_predivide_factor": 2.0}])
def test_a_hook_excludes_what_it_decides_itself(arguments: dict[str, Any]) -> None:
    def step(runtime: Runtime) -> None:
        with pytest.raises(ValueError, match="comm_hook decides itself"):
            wrap_optimizer(torch.optim.SGD(net().parameters(), lr=0.1), comm_hook=comm_hooks.AllReduce(),
                           runtime=runtime, **arguments)
    threads(1, step)


def test_ranks_that_joined_early_compress_in_the_same_step() -> None:
    def step(runtime: Runtime) -> list[Any]:
        model = net()
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), runtime=runtime,
                                   comm_hook=comm_hooks.PowerSGD(1, start_iter=4, min_compression_rate=0.0))
        for _ in range(3):
            with optimizer.join():
                for loss in losses(runtime, model, optimizer, range(1 + runtime.world.rank)):
                    loss.backward()
                    optimizer.step()
        return weights(model)
    one, other = threads(2, step)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["powersgd of full rank", "allreduce"])
def test_the_gradients_that_there_are_change_from_step_to_step(kind: str) -> None:
    """PowerSGD needs a factor for every gradient, whenever it comes."""
    turns = [("ab", "ab"), ("ab", "ab"), ("ab", "a"), ("a", "a"), ("a", "ab"), ("b", "b"), ("b", "a"), ("", "ab"),
             ("ab", "ab"), ("abc", "ab"), ("ab", "abc"), ("c", "c"), ("", ""), ("ab", "ab")]

    def step(runtime: Runtime) -> None:
        named = {name: torch.nn.Parameter(torch.ones(3, 3)) for name in "abc"}
        optimizer = wrap_optimizer(torch.optim.SGD(named.values(), lr=1.0), named.items(), comm_hook=EXACT[kind](),
                                   runtime=runtime)
        for turn, names in enumerate(turns):
            optimizer.zero_grad()
            if names[runtime.world.rank]:
                sum(named[name].sum() * (turn + 1) for name in names[runtime.world.rank]).backward()
            optimizer.synchronize()
            for name, parameter in named.items():
                having = sum(name in each for each in names)
                assert (parameter.grad is None) == (not having), (turn, name)
                if having:
                    torch.testing.assert_close(parameter.grad, torch.full((3, 3), (turn + 1) * having / 2))
            optimizer.step()
    threads(2, step)


def test_a_hook_of_ones_own_has_other_collectives() -> None:
    class Sparse:
        def reduce(self, gradients: Any, exchange: Any) -> None:
            assert exchange.size == exchange.active == 2
            ((name, gradient),) = gradients
            assert name == "w" and exchange.parameters[0].shape == gradient.shape
            indices = exchange.gather("indices", gradient.nonzero()[:, 0])
            values = exchange.gather("values", gradient[gradient != 0])
            factor = exchange.largest("factor", torch.tensor([exchange.rank, 2.0 - exchange.rank]))
            gradient.zero_().index_add_(0, indices, values).mul_(factor.sum())

    def step(runtime: Runtime) -> None:
        w = torch.nn.Parameter(torch.zeros(4))
        optimizer = wrap_optimizer(torch.optim.SGD([w], lr=1.0), [("w", w)], comm_hook=Sparse(), runtime=runtime)
        for _ in range(2):
            optimizer.zero_grad()
            (w[:2].sum() if runtime.world.rank else w[1]).backward()
            assert w.grad.tolist() == [3, 6, 0, 0]
    threads(2, step)


def test_what_is_no_hook_is_refused() -> None:
    def step(runtime: Runtime) -> None:
        def optimizer(hook: Any) -> Any:
            return wrap_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1), comm_hook=hook,
                                  runtime=runtime)
        with pytest.raises(ValueError, match=r"reduce\(gradients, exchange\).*DDPHook\(state, function\)"):
            optimizer(lambda state, bucket: None)
        hook = comm_hooks.PowerSGD()
        first, second = optimizer(hook), optimizer(hook)
        first.param_groups[0]["params"][0].sum().backward()
        with pytest.raises(ValueError, match="PowerSGD belongs to another optimizer already"):
            second.param_groups[0]["params"][0].sum().backward()
    threads(2, step)
    for make, text in ((lambda: comm_hooks.PowerSGD(0), "at least 1, not 0"),
                       (lambda: comm_hooks.PowerSGD(loss_scale=1024.0), "a function that returns the factor"),
                       (lambda: comm_hooks.DDPHook(None, None), "a function of")):
        with pytest.raises(ValueError, match=text):
            make()
