"""Copies and pickles of distributed optimizers are plain optimizers, which train as if they had never been wrapped."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.mirroring import strategy_on  # noqa: E402
from tests.torch.models import batches, net, share, train, weights  # noqa: E402
from tests.worlds import threads  # noqa: E402


def adam(model: Any) -> Any:
    return torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}], lr=0.01)


def averaged(runtime: Runtime) -> tuple[Any, Any]:
    model = net()
    return model, wrap_optimizer(adam(model), model.named_parameters(), runtime=runtime)


def adaptive(runtime: Runtime) -> tuple[Any, Any]:
    model = net()
    return model, wrap_optimizer(adam(model), model.named_parameters(), op=ReduceOp.ADASUM, runtime=runtime)


def mirrored(runtime: Runtime) -> tuple[Any, Any]:
    with strategy_on(runtime).scope():
        model = net()
        return model, adam(model)


def on_next_batch(optimizer: Any, model: Any, rank: int) -> list[Any]:
    x, y = list(batches(2, 2))[1]
    train(optimizer, model, x.chunk(2)[rank], y.chunk(2)[rank])
    return weights(model)


def by_deepcopy(model: Any, optimizer: Any) -> tuple[Any, Any]:
    return copy.deepcopy((model, optimizer))


def by_pickle(model: Any, optimizer: Any) -> tuple[Any, Any]:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert b"hvdlite" not in pickle.dumps(optimizer, protocol), "it is to be loaded where hvdlite is not installed"
        text = pickle.dumps((model, optimizer), protocol)
    return pickle.loads(text)  # noqa: S301


def by_torch_save(model: Any, optimizer: Any) -> tuple[Any, Any]:
    file = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return loaded["model"], loaded["optimizer"]


def by_scheduler(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """A scheduler holds its optimizer."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    copied, second = copy.deepcopy((model, scheduler))
    before = second.optimizer.param_groups[0]["lr"]
    second.step()
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(before / 10) and optimizer.param_groups[0]["lr"] == before
    for group in second.optimizer.param_groups:
        group["lr"] *= 10
    return copied, second.optimizer


COPIES: list[Callable[[Any, Any], tuple[Any, Any]]] = [by_deepcopy, by_pickle, by_torch_save, by_scheduler]


@pytest.mark.filterwarnings("ignore:.*copy of a distributed", "ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("make", [averaged, adaptive, mirrored])
def test_copies_are_plain_and_the_original_trains_on(make: Callable[[Runtime], tuple[Any, Any]]) -> None:
    def step(runtime: Runtime) -> Any:
        model, optimizer = make(runtime)
        x, y = next(batches(1, 2))
        train(optimizer, model, share(x, runtime), share(y, runtime))
        plain_model = net()
        plain = adam(plain_model)
        plain_model.load_state_dict(model.state_dict())
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        expected = on_next_batch(plain, plain_model, runtime.world.rank)
        for by in COPIES:
            copied, other = by(model, optimizer)
            assert type(other) is torch.optim.Adam and other is not optimizer
            assert next(copied.parameters()) is other.param_groups[0]["params"][0]
            for mine, theirs in zip(on_next_batch(other, copied, runtime.world.rank), expected, strict=True):
                assert torch.equal(mine, theirs), by.__name__
        shallow = copy.copy(optimizer)
        assert type(shallow) is torch.optim.Adam and shallow.param_groups is optimizer.param_groups
        return on_next_batch(optimizer, model, runtime.world.rank)
    one, other = threads(2, step)
    assert all(map(torch.equal, one, other))


def test_a_copy_warns_once_that_it_trains_alone() -> None:
    def step(runtime: Runtime) -> None:
        for make in (averaged, adaptive):
            model, optimizer = make(runtime)
            copied, other = copy.deepcopy((model, optimizer))
            with pytest.warns(UserWarning, match=f"rank {runtime.world.rank}: this Adam is a copy of a distr") as caught:
                for _ in range(3):
                    on_next_batch(other, copied, runtime.world.rank)
            assert len(caught) == 1
            copy.copy(optimizer)
    # Warnings are recorded for the whole process, so one rank at a time.
    threads(1, lambda runtime: by_deepcopy(*averaged(runtime)))
    for rank in range(2):
        threads(2, lambda runtime, rank=rank: step(runtime) if runtime.world.rank == rank else None)


@pytest.mark.filterwarnings("error:.*copy of a distributed")
def test_a_copy_that_is_wrapped_trains_in_step() -> None:
    def step(runtime: Runtime) -> list[Any]:
        model, other = copy.deepcopy(averaged(runtime))
        wrap_optimizer(other, model.named_parameters(), runtime=runtime)
        return on_next_batch(other, model, runtime.world.rank)
    one, other = threads(2, step)
    assert all(map(torch.equal, one, other))


def test_averaged_models() -> None:
    """`torch.optim.swa_utils` copies the model: the copy follows on every rank alike."""
    def step(runtime: Runtime) -> list[Any]:
        model, optimizer = averaged(runtime)
        follower = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.005)
        for x, y in batches(3, 2):
            train(optimizer, model, share(x, runtime), share(y, runtime))
            follower.update_parameters(model)
            scheduler.step()
        return weights(follower)
    one, other = threads(2, step)
    alone = net()
    optimizer = adam(alone)
    follower = torch.optim.swa_utils.AveragedModel(alone, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.005)
    for x, y in batches(3, 2):
        train(optimizer, alone, x, y)
        follower.update_parameters(alone)
        scheduler.step()
    for mine, theirs, expected in zip(one, other, weights(follower), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
