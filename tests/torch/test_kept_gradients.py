"""Gradients that scripts keep, parameters that become trainable later, and layouts that gradients come and go in."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import MismatchError, UnsupportedError  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import Compression  # noqa: E402
from hvdlite_torch.gradients.places import TorchPlaces  # noqa: E402
from hvdlite_torch.gradients.torch_gradients import TorchGradients  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.models import by_bucket, net, reducer_of, weights  # noqa: E402
from tests.worlds import threads  # noqa: E402

KEPT: dict[str, Callable[[Any], Any]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "a slice": lambda gradient: gradient.reshape(-1)[1:],
    "numpy": lambda gradient: gradient.numpy(),
    "a graph": lambda gradient: (gradient * torch.ones_like(gradient, requires_grad=True)).sum(),
}


def wrapped(runtime: Runtime, model: Any, **options: Any) -> Any:
    return wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), runtime=runtime,
                          **options)


def embedding() -> Any:
    return torch.nn.Embedding.from_pretrained(torch.linspace(-1, 1, 60).reshape(20, 3), freeze=False, sparse=True)


def backward(model: Any, factor: float) -> None:
    (model(torch.ones(4, 6)).sum() * factor).backward()


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16], ids=["plain", "fp16"])
@pytest.mark.parametrize("kept", KEPT)
# docs/protocol.md#kept-gradients
def test_a_gradient_that_is_kept_does_not_change(kept: str, compression: Any) -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model, compression=compression)
        for turn in range(1, 14):
            optimizer.zero_grad()
            backward(model, turn)
            gradients = [parameter.grad for parameter in model.parameters()]
            old = [KEPT[kept](gradient) for gradient in gradients]
            copies = [gradient.clone() for gradient in gradients]
            del gradients
            optimizer.zero_grad()
            backward(model, 100.0)
            for held, values in zip(old, copies, strict=True):
                if kept == "a graph":
                    held.backward()  # raises when what it saved was overwritten
                else:
                    torch.testing.assert_close(torch.as_tensor(held).reshape(-1), KEPT[kept](values).reshape(-1)
                                               if kept != "numpy" else values.reshape(-1))
        assert by_bucket(optimizer)
        del old, held
    threads(2, step)


def test_a_gradient_that_is_kept_where_the_next_round_has_none() -> None:
    """Its place is filled with the operation's identity, and others write the result there."""
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        for turn in range(1, 9):
            optimizer.zero_grad()
            backward(model, turn)
            old = model[0].weight.grad
            values = old.clone()
            optimizer.zero_grad()
            if turn % 2 or runtime.world.rank == 1:
                backward(model, 100.0)
            else:
                model[2](torch.ones(4, 16)).sum().backward()
            optimizer.step()
            assert torch.equal(old, values)
    threads(2, step)


def test_only_what_is_kept_is_copied_out_and_the_layout_is_learned_again() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        kept: list[Any] = []
        bucketed = 0
        for turn in range(40):
            optimizer.zero_grad()
            backward(model, turn)
            bucketed += by_bucket(optimizer)
            if runtime.world.rank == 0:
                kept.append(model[0].weight.grad)
            optimizer.step()
        assert bucketed >= 34
        framework = reducer_of(optimizer).framework
        assert len(framework._kept) == (runtime.world.rank == 0) and framework._as_view
    threads(2, step)


def test_a_parameter_that_is_unfrozen_is_reduced_from_then_on() -> None:
    def step(runtime: Runtime) -> tuple[list[Any], bool]:
        model = net()
        model[0].requires_grad_(False)
        optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.05), runtime=runtime)
        for turn in range(12):
            if turn in (4, 8):
                model[0].requires_grad_(turn == 4)
            if turn == 6:
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            x = torch.randn(6, 6, generator=torch.Generator().manual_seed(10 * turn + runtime.world.rank))
            loss = model(x).square().mean()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
        return weights(model), by_bucket(optimizer)
    (first, _), (second, learned) = threads(2, step)
    assert learned
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    for turn in range(12):
        model[0].requires_grad_(4 <= turn < 8)
        model[2].requires_grad_(turn < 6)
        plain.zero_grad()
        x = torch.cat([torch.randn(6, 6, generator=torch.Generator().manual_seed(10 * turn + rank)) for rank in range(2)])
        loss = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
        plain.step()
    for one, other, alone in zip(first, second, weights(model), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, alone)


def test_a_parameter_that_is_unfrozen_on_one_rank_only_is_an_error() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        model[0].requires_grad_(False)
        optimizer = wrapped(runtime, model)
        for turn in range(6):
            if turn == 4 and runtime.world.rank == 1:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            if turn == 4 and runtime.world.rank == 1:
                with pytest.raises(MismatchError, match=r"rank 1: reduces '.*0\.(weight|bias)'.*rank 0: does not have it"):
                    backward(model, 1.0)
            else:
                backward(model, 1.0)
                optimizer.step()
            if turn == 4:
                runtime.barrier("end").wait()
                return
    threads(2, step)


def test_gradients_that_a_script_computes_itself_count() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        for _ in range(5):
            loss = model(torch.ones(4, 6)).sum() * (runtime.world.rank + 1)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient * 1.5 / (runtime.world.rank + 1))
    threads(2, step)


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_gradients_that_a_script_sets_beside_a_backward_pass_count(wait_in: str) -> None:
    def step(runtime: Runtime) -> None:
        a, b = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([a, b], lr=0.1), runtime=runtime, wait_in=wait_in)
        for _ in range(5):
            optimizer.zero_grad()
            (a * (runtime.world.rank + 1)).sum().backward()
            b.grad = torch.full((4,), runtime.world.rank + 1.0)
            optimizer.step()
        for each in (a, b):
            torch.testing.assert_close(each.data, torch.full((4,), 1 - 5 * 0.15))
    threads(2, step)


def test_a_gradient_that_nobody_clears_or_computes_stays_what_it_is() -> None:
    """With Sum, reducing it again would multiply it."""
    def step(runtime: Runtime) -> None:
        a, b = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        optimizer = wrap_optimizer(torch.optim.SGD([a, b], lr=0.0), runtime=runtime, op=ReduceOp.SUM)
        b.sum().backward()
        optimizer.step()
        for _ in range(10):
            a.grad = None
            a.sum().backward()
            optimizer.step()
            assert torch.equal(b.grad, torch.full((4,), 2.0))
        assert by_bucket(optimizer)
    threads(2, step)


def test_a_gradient_that_is_moved_to_other_shared_memory() -> None:
    def step(runtime: Runtime) -> None:
        model = net()
        optimizer = wrapped(runtime, model)
        for turn in range(8):
            optimizer.zero_grad()
            backward(model, runtime.world.rank + 1)
            if turn == 4:
                model[0].weight.grad.share_memory_()
            alone = net()
            backward(alone, 1.5)
            torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad)
            optimizer.step()
    threads(2, step)


@pytest.mark.parametrize("kind", ["SparseAdam", "SGD"])
def test_densified_gradients_come_back_sparse(kind: str) -> None:
    """As Horovod's do; a rank without a gradient of its own included."""
    def step(runtime: Runtime) -> Any:
        table = embedding()
        optimizer = wrap_optimizer(getattr(torch.optim, kind)(table.parameters(), lr=0.1), runtime=runtime,
                                   sparse_as_dense=True)
        for turn in range(8):
            optimizer.zero_grad()
            if turn % 3 or runtime.world.rank == 1:
                table(torch.tensor([turn, runtime.world.rank])).sum().backward()
            optimizer.step()
            assert kind == "SGD" or table.weight.grad.is_sparse
        return table.weight.detach()
    one, other = threads(2, step)
    assert torch.equal(one, other)
    table = embedding()
    plain = getattr(torch.optim, kind)(table.parameters(), lr=0.1)
    for turn in range(8):
        plain.zero_grad()
        rows = [[turn, rank] for rank in range(2) if turn % 3 or rank == 1]
        (table(torch.tensor(rows)).sum() / 2).backward()
        plain.step()
    torch.testing.assert_close(one, table.weight.detach())


def test_a_sparse_gradient_without_such_an_op_is_an_error_after_which_the_job_goes_on() -> None:
    def step(runtime: Runtime) -> None:
        table, model = torch.nn.Embedding(20, 3, sparse=True), net()
        parameters = [*table.parameters(), *model.parameters()]
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.1), op=ReduceOp.MAX, runtime=runtime)
        for _ in range(3):
            optimizer.zero_grad()
            with pytest.raises(UnsupportedError, match="no Max"):
                table(torch.tensor([1])).sum().backward()
            assert reducer_of(optimizer).round is None
            optimizer.zero_grad()
            backward(model, runtime.world.rank + 1)
            optimizer.step()
    threads(2, step)


@pytest.mark.parametrize("to_none", [True, False])
def test_compressed_gradients_come_back_in_the_memory_in_which_they_came(to_none: bool) -> None:
    """Nothing is allocated for them; a compressor of the script's own still decides itself."""
    class Halving(Compression.none):
        @classmethod
        def compress(cls, tensor: Any) -> Any:
            return (tensor / 2).to(torch.float16), tensor.dtype

        @classmethod
        def decompress(cls, tensor: Any, context: Any) -> Any:
            return tensor.to(context) * 2

    def step(runtime: Runtime) -> None:
        for compression in (Compression.fp16, Compression.bf16, Halving):
            wide = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
            small, large = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(100, 100))
            parameters = [wide, small, large]
            optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.0), compression=compression, runtime=runtime)
            came: dict[Any, int] = {}
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(lambda own, came=came: came.update({own: own.grad.data_ptr()}))
            for turn in range(8):
                sum(parameter.sum() * (turn + 1) * (runtime.world.rank + 1) for parameter in parameters).backward()
                for parameter in parameters:
                    assert (parameter.grad == 1.5 * (turn + 1)).all() and parameter.grad.dtype is parameter.dtype
                    assert parameter.grad.data_ptr() == came[parameter]
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
    threads(2, step)


def test_a_gradient_that_was_written_to_and_leaves_its_bucket_is_no_new_one() -> None:
    """It is copied where its bucket stays whole; where another kept gradient has broken the bucket, it is not."""
    def step(runtime: Runtime) -> None:
        small, large = parameters = [torch.nn.Parameter(torch.ones(n)) for n in (10, 5000)]
        optimizer = wrap_optimizer(torch.optim.SGD(parameters, lr=0.0), runtime=runtime)

        def backward(*used: Any) -> None:
            sum((parameter * (runtime.world.rank + 1.0)).sum() for parameter in used).backward()
        for _ in range(4):
            optimizer.zero_grad()
            backward(small, large)
            optimizer.step()
        assert by_bucket(optimizer)
        kept = large.grad if runtime.world.rank == 0 else None
        small.grad.mul_(2.0)  # by the script, after the step; all ranks do so
        small.requires_grad_(False)
        for _ in range(3):
            large.grad = None
            backward(large)
            assert torch.equal(small.grad, torch.full((10,), 3.0)) and torch.equal(large.grad, torch.full((5000,), 1.5))
        del kept
    threads(2, step)


def test_places_are_in_no_cycle() -> None:
    """They hold the memory of a bucket, which is not to wait for a collection of garbage."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    memory = [np.zeros(3, np.float32) for _ in parameters]
    bucket: Any = types.SimpleNamespace(logical=memory.__getitem__, memory=memory[0])
    gc.disable()
    try:
        places = TorchPlaces(TorchGradients(Compression.none, False), bucket, parameters)
        assert places._together is not None
        is_there = weakref.ref(places)
        del places
        assert is_there() is None
    finally:
        gc.enable()
