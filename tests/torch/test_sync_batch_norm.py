"""Batch normalization over all ranks equals ordinary batch normalization of the whole batch."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

import hvdlite_torch as hvd
from hvdlite import api
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.gradients.weights import GradientWeight
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer
from tests.torch.programs import sync_batch_norm as programs
from tests.worlds import TORCH, processes, threads


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_it_equals_one_rank_with_the_whole_batch(size: int) -> None:
    processes(size, programs.it_equals_one_rank_with_the_whole_batch, imported=TORCH)


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a script on ranks that are threads; it is called with its rank."""
    current = threading.local()
    monkeypatch.setattr(api.worlds(), "current", lambda: current.runtime)

    def run(step: Callable[[int], None], size: int = 2) -> None:
        def with_runtime(runtime: Runtime) -> None:
            current.runtime = runtime
            step(runtime.world.rank)
        threads(size, with_runtime)
    return run


def compare(rank: int, plain: Any, whole: Any, counts: Sequence[int], use: Callable[[Any, Any], Any],
            **close: float) -> None:
    """Assert that output, gradients and statistics on a rank's rows are those of one process with all rows.

    Args:
        use: returns a loss of the output and the input; a sum over rows.
    """
    synced = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(copy.deepcopy(plain)))[0]
    rows = slice(sum(counts[:rank]), sum(counts[:rank + 1]))
    expected_x, x = (each.detach().clone().requires_grad_() for each in (whole, whole[rows]))
    expected, got = plain(expected_x), synced(x)
    use(expected, expected_x).backward()
    use(got, x).backward()
    assert got.dtype is expected.dtype and got.stride() == expected[rows].stride()
    torch.testing.assert_close(got, expected[rows], **close)
    torch.testing.assert_close(x.grad, expected_x.grad[rows], **close)
    for name, parameter in plain.named_parameters():
        total = hvd.allreduce(getattr(synced, name).grad, op=hvd.Sum)
        torch.testing.assert_close(total, parameter.grad, **close)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(getattr(synced, name), buffer, **close)


def squares(output: Any, _: Any) -> Any:
    return output.pow(3).sum()


def penalty(output: Any, x: Any) -> Any:
    (gradient,) = torch.autograd.grad(torch.sigmoid(output).sum(), x, create_graph=True)
    return gradient.square().sum() + output.pow(3).sum()


def random(*shape: int, dtype: Any = torch.float64) -> Any:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


def test_memory_orders_dtypes_and_second_derivatives_equal_one_process(on_ranks: Any) -> None:
    def step(rank: int) -> None:
        norm = torch.nn.BatchNorm2d
        for counts in ((2, 3), (0, 4)):  # a rank without samples takes part
            for use in (squares, penalty):
                compare(rank, norm(4).double(), random(sum(counts), 4, 2, 3) + 2, counts, use)
                compare(rank, norm(4, affine=False, momentum=None).double(), random(sum(counts), 4, 2, 3), counts, use)
        image = random(5, 4, 3, 3)
        compare(rank, norm(4).double(), image.contiguous(memory_format=torch.channels_last), (2, 3), squares)
        compare(rank, norm(4).double(), image.contiguous(memory_format=torch.channels_last), (2, 3), penalty)
        compare(rank, torch.nn.BatchNorm1d(4).double(), random(5, 3, 4).transpose(1, 2), (2, 3), squares)
        compare(rank, torch.nn.BatchNorm3d(4).double(), random(5, 4, 2, 2, 2).contiguous(
            memory_format=torch.channels_last_3d), (2, 3), squares)
        compare(rank, norm(4), random(8, 4, 5, 5, dtype=torch.float32) + 1000, (3, 5), squares, rtol=2e-3, atol=2e-3)
        # With parameters of float32, as under autocast, and of 16 bits.
        orders = (torch.contiguous_format, torch.channels_last)
        for dtype, order in itertools.product((torch.bfloat16, torch.float16), orders):
            for plain in (norm(4), norm(4).to(dtype)):
                batch = random(5, 4, 3, 3).to(dtype).contiguous(memory_format=order)
                compare(rank, plain, batch, (2, 3), squares, rtol=0.05, atol=0.05)
            # Terms of the gradient that exceed 16 bits, and cancel: its exact value is 0.
            compare(rank, norm(4), (0.01 * random(50, 4, 3, 3)).to(dtype).contiguous(memory_format=order), (20, 30),
                    lambda output, _: (1024 * output.float()).sum(), rtol=0.05, atol=2.0)
    on_ranks(step)


def test_batches_without_values_and_layers_in_place(on_ranks: Any) -> None:
    def step(rank: int) -> None:
        for options in ({}, {"momentum": None}, {"track_running_stats": False}):
            layer, plain = hvd.SyncBatchNorm(3, **options), torch.nn.BatchNorm1d(3, **options)
            for batch in (random(4, 3, dtype=torch.float32), torch.empty(0, 3)):
                plain(batch)
                x = batch[2 * rank:2 * rank + 2].requires_grad_()
                layer(x).sum().backward()
                assert x.grad.isfinite().all() and layer.weight.grad.isfinite().all()
            for name, buffer in plain.named_buffers():
                torch.testing.assert_close(getattr(layer, name), buffer)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            hvd.SyncBatchNorm(3)(torch.ones(rank, 3))
        for affine in (True, False):
            norm = hvd.SyncBatchNorm(3, affine=affine)
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), norm, torch.nn.ReLU(inplace=True))
            model(torch.randn(4, 3)).square().sum().backward()
            gradients = []
            for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
                model.zero_grad()
                x = random(4, 3, dtype=torch.float32).requires_grad_()
                (model(x) if options is None else checkpoint(model, x, **options)).square().sum().backward()
                gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
            torch.testing.assert_close(gradients[0], gradients[1])
            torch.testing.assert_close(gradients[0], gradients[2])
        frozen = hvd.SyncBatchNorm(3)
        frozen(torch.randn(4, 3)).sum().backward()  # an input without a gradient
        assert frozen.bias.grad.tolist() == [4, 4, 4]
    on_ranks(step)


def test_a_layer_with_several_places_is_converted_in_all_of_them() -> None:
    shared = torch.nn.BatchNorm1d(3)
    block = torch.nn.Sequential(torch.nn.Linear(3, 3), shared)
    model = torch.nn.ModuleDict({"a": shared, "b": shared, "one": block, "two": block})
    model["none"] = None
    names = set(model.state_dict())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted["a"]) is hvd.SyncBatchNorm
    assert converted["a"] is converted["b"] is converted["one"][1] and converted["one"] is converted["two"]
    assert converted["a"].weight is shared.weight and set(converted.state_dict()) == names
    with pytest.raises(ValueError, match="LazyBatchNorm1d does not know its number of features"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.LazyBatchNorm1d()))


def test_evaluation_needs_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "runtime", lambda: pytest.fail("asked for"))
    x = random(4, 3, dtype=torch.float32)
    torch.testing.assert_close(hvd.SyncBatchNorm(3).eval()(x), torch.nn.BatchNorm1d(3).eval()(x))


class InOperations(torch.nn.Module):
    """A BatchNorm1d in operations of its own: torch's takes its statistics for constants in third derivatives."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        normal = (x - x.mean(0)) / (x.var(0, correction=0) + self.layer.eps).sqrt()
        return normal * self.layer.weight + self.layer.bias if self.layer.affine else normal


def test_each_backward_pass_weighs_what_is_weighted_afterwards(on_ranks: Any) -> None:
    """Gradients that reach parameters are multiplied by a rank's weight afterwards; those of a penalty are not."""
    counts = (2, 4)
    whole = random(sum(counts), 3)

    def plainly(model: Any, x: Any) -> Any:
        return model(x).pow(3).sum(1).mean()

    def penalized(model: Any, x: Any) -> Any:
        x = x.clone().requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return gradient.square().sum(1).mean() + output.square().mean()

    def twice_penalized(model: Any, x: Any) -> Any:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.pow(3).sum(), x, create_graph=True)
        return second.square().sum(1).mean()

    def recomputed(model: Any, x: Any) -> Any:
        return checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).pow(3).sum(1).mean()

    def accumulated(loss: Any, wanted: Any) -> Any:
        loss.backward()
        return [each.grad for each in wanted]

    def accumulated_in_some(loss: Any, wanted: Any) -> Any:
        loss.backward(inputs=wanted)
        return [each.grad for each in wanted]

    ways = [(recomputed, accumulated), *itertools.product((plainly, penalized, twice_penalized),
                                                          (accumulated, accumulated_in_some, torch.autograd.grad))]

    def step(rank: int) -> None:
        rows = slice(sum(counts[:rank]), sum(counts[:rank + 1]))
        weighing = GradientWeight(api.runtime())
        weight = counts[rank] * len(counts) / sum(counts)
        for affine in (True, False):
            for use, way in ways:
                plain = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3, affine=affine), torch.nn.Tanh(),
                                            torch.nn.Linear(3, 2)).double()
                for index, parameter in enumerate(plain.parameters()):
                    parameter.data.copy_(random(9)[:parameter.numel()].view_as(parameter) + index / 9)
                synced = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
                weighing.set(weight, synced.parameters())
                plain[1] = InOperations(plain[1])
                expected = way(use(plain, whole), [plain[0].weight])
                got = way(use(synced, whole[rows]), [synced[0].weight])
                if way is torch.autograd.grad:  # accumulates nothing
                    got = [each * weight for each in got]
                torch.testing.assert_close(hvd.allreduce(got[0]), expected[0], msg=f"{use.__name__}, {way.__name__}")
        layer = hvd.SyncBatchNorm(3, track_running_stats=False)
        with pytest.raises(hvd.UnsupportedError, match=r"with torch\.func in a batch"):
            torch.func.grad(lambda x: layer(x).sum())(torch.ones(3, 3))
        weighing.set(1.0, [])
    on_ranks(step)


def test_two_optimizers_with_weights(on_ranks: Callable[..., None]) -> None:
    """A backward pass goes through the layer to the parameters of both; their first passes had other batches."""
    torch.manual_seed(0)  # here, because ranks are threads
    models = (torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh()).double(),
              torch.nn.Linear(4, 2).double())

    def train(mine: Sequence[int], convert: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> list[Any]:
        first, second = copy.deepcopy(models)
        first = convert(first)
        optimizers = [wrap(torch.optim.SGD(model.parameters(), lr=0.1)) for model in (first, second)]
        for turn in range(8):
            counts = [2 + (5 * turn + 3 * rank) % 4 for rank in mine]
            x = torch.cat([torch.randn(count, 6, generator=torch.Generator().manual_seed(10 * turn + rank),
                                       dtype=torch.float64) for rank, count in zip(mine, counts, strict=True)])
            hidden = first(x) if turn % 2 else first(x).detach()
            for optimizer in optimizers:
                optimizer.zero_grad()
                if len(mine) == 1:
                    optimizer.set_weight(counts[0])
            second(hidden).square().mean().backward()
            optimizers[1 - turn % 2].step()
        return [parameter.detach().clone() for parameter in (*first.parameters(), *second.parameters())]

    expected = train([0, 1], lambda model: model, lambda plain: plain)

    def step(rank: int) -> None:
        got = train([rank], hvd.SyncBatchNorm.convert_sync_batchnorm,
                    lambda plain: wrap_optimizer(plain, runtime=api.runtime()))
        for own, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-10)
    on_ranks(step)
